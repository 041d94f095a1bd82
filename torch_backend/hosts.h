// How the ranks of a group on several hosts get what those of one host share, and what carries
// bytes between the hosts.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "compat.h"
#include "core/deadline.h"
#include "core/options.h"
#include "cross/byte_transport.h"
#include "cross/host_collectives.h"
#include "shm/rendezvous.h"

namespace horon::torch_backend {

// Connects the ranks that messages call `numbers`, of which this is the `rank`-th.
using ColumnMaker = std::function<std::shared_ptr<ByteTransport>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::vector<int>& numbers)>;

struct Hosts {
  std::unique_ptr<HostCollectives> collectives;
  HostLayout layout;
  std::shared_ptr<SharedGroup> own;  // what the ranks of this host share; null if it has but one
};

// Of a group that rendezvous() has told the whereabouts of, in `store`. `all` carries bytes between
// all ranks. Empty where no host has several ranks, where
// these share no memory after all, and if options.hierarchical is off: the same on every rank.
// Blocks until all ranks have come. Throws as rendezvous() and make_column().
Hosts make_hosts(const c10::intrusive_ptr<c10d::Store>& store, const GroupIdentity& identity,
                 const Options& options, const Deadline& deadline, const Whereabouts& whereabouts,
                 ByteTransport& all, const ColumnMaker& make_column,
                 const std::function<void()>& look_around);

}  // namespace horon::torch_backend
