// What carries bytes between the ranks of a group that do not all share memory.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "compat.h"
#include "core/deadline.h"
#include "cross/byte_transport.h"
#include "cross/greeting.h"
#include "gloo_adapter.h"
#include "watch/door_watch.h"

namespace horon::torch_backend {

struct Connected {
  std::shared_ptr<ByteTransport> bytes;
  std::vector<RemotePeer> for_messages;  // one more to each, if these are asked for
  std::vector<DoorWatch::Neighbour> doors;
};

// Connections of our own between ranks that messages call `numbers`, of which this is the
// `rank`-th. Blocks until all of these have come, or one could not. `look_around` is called now and
// then; throws to give up. Throws Error where the connections can not be made.
Connected connect_all(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                      const std::vector<int>& numbers, bool for_messages, const Deadline& deadline,
                      const std::function<void()>& look_around);

// The same for ranks that messages call as they are numbered here, with two connections to each;
// without `bytes` on all of them where one could not connect, which says why.
Connected connect_all_or_none(const c10::intrusive_ptr<c10d::Store>& store, int rank, int n_ranks,
                              const Deadline& deadline, const std::function<void()>& look_around);

// Whether it is so on all ranks that `all` connects. Throws what that throws.
bool is_so_on_all(bool is_so, ByteTransport& all, int n_ranks, const WaitContext& context);

}  // namespace horon::torch_backend
