// One-sided communication: every rank of a group may store into a tensor of every other one.
//
// Note [Windows]
// A window is made by all ranks together: the ranks agree on it in an arrival phase and exchange
// where in their arenas their parts lie (WindowOffer). After that nothing is collective. A put is a
// copy by the source's thread into the target's memory, followed by a signal; the target finds out
// by waiting for the signal. Nothing on the target's side takes part in a put, so it can not be
// refused there: what could be wrong is checked by the source, from what was exchanged.
//
// A wait for a signal can fail by itself: no buffers are in use, so the group, the window and the
// signal that may still come are as before.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/request.h"
#include "shm/rendezvous.h"
#include "shm/shared_store.h"
#include "shm/window_signals.h"

namespace horon {

// What a rank brings to a window.
struct WindowTensor {
  std::byte* data = nullptr;
  std::uint64_t count = 0;
  std::size_t element_bytes = 1;
  DType dtype = DType::kOpaque;
  std::uint8_t type_code = 0;  // see Request
  std::vector<std::int64_t> sizes;
};

// The exchange by which the ranks make a window. Not movable: the request points into it.
// Thread safety: none.
class WindowOffer {
 public:
  // `refusal`: not empty if the tensor can not be used. That the tensor lies in the arena is
  // checked here. `number`: of the window, where it exists already.
  WindowOffer(OpKind kind, std::shared_ptr<const SharedGroup> group,
              std::shared_ptr<LentMemory> lent, const WindowTensor& tensor,
              const std::string& refusal, std::uint64_t number);
  // Lets go of the own part, if there was neither withdraw() nor accept().
  ~WindowOffer();
  WindowOffer(const WindowOffer&) = delete;
  WindowOffer& operator=(const WindowOffer&) = delete;

  // To be run by the group's transport.
  const Request& request() const { return request_; }
  // When that threw a MismatchError. After other errors peers may know of the memory already, and
  // it stays lent until they end.
  void withdraw();
  // When it has returned.
  std::shared_ptr<WindowAccess> accept();

 private:
  const std::shared_ptr<const SharedGroup> group_;
  const std::shared_ptr<LentMemory> lent_;
  const std::size_t element_bytes_;
  std::shared_ptr<WindowMemory> memory_;  // null: refused, withdrawn or accepted
  std::vector<WindowPart> parts_;         // by rank
  WindowPart own_;
  Request request_;
};

// Thread safety: all methods.
class Window {
 public:
  explicit Window(std::shared_ptr<WindowAccess> access);

  const std::shared_ptr<WindowAccess>& access() const { return access_; }

  // Copies elements into the target's part at `offset` (in elements), then signals. Throws
  // UsageError for what does not fit, PeerLostError when the target has left, GroupError when the
  // group has ended.
  void put(int target, std::int64_t offset, const std::byte* data, std::uint64_t count);
  // Throws as put().
  void signal(int target);

  // Takes a signal of that rank; waits for it. Throws UsageError, TimeoutError, PeerLostError,
  // GroupError (when the group has ended) and what context.check_interrupt throws, and then takes
  // none.
  void wait_signal(int source, const WaitContext& context);

  // The same in parts.
  std::shared_ptr<ExpectedSignal> expect_signal(int source);
  bool look_for(int source, const ExpectedSignal& signal) {
    return incoming_[static_cast<std::size_t>(source)].look_for(signal);
  }
  // Throws as wait_signal(); the signal stays expected.
  void await(int source, const ExpectedSignal& signal, const WaitContext& context);
  // Throws what await() would throw instead of sleeping.
  void check_wait(int source, const ExpectedSignal& signal, const Deadline& deadline);
  bool forget(int source, const ExpectedSignal& signal) {
    return incoming_[static_cast<std::size_t>(source)].forget(signal);
  }

  // Throws UsageError unless it is a rank of the group.
  void check_rank(const char* operation, std::int64_t rank) const;

 private:
  void check_open(const char* operation) const;
  void check_target(const char* operation, int target) const;

  const std::shared_ptr<WindowAccess> access_;
  const std::uint32_t fork_generation_;
  const Segment& segment_;
  const Peers& peers_;
  std::deque<IncomingSignals> incoming_;  // by source
  std::mutex store_mutex_;
  SharedStore store_;  // guarded by store_mutex_
};

}  // namespace horon
