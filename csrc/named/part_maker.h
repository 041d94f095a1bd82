// What makes a tensor part by part, while it is reduced.
//
// Note [Made in parts]
// A gradient that is larger than the second-level caches has left them when it is reduced, however
// soon: reading it again takes as long as everything else that a reduction within a host does. If
// what makes it can make a part at a time, each part is reduced while it is still there. So an
// operation may be submitted before its tensor is made, with a PartMaker, on the thread that makes
// it, which then meets the other ranks (Note [Meetings] in named_engine.h): they take turns between
// making a part and reducing it. If the others do not come, or if another thread carries the
// operation out, the tensor is made as a whole, and then reduced.
//
// Making a part at a time may take longer than making all at once. Which way is faster is found out
// for each operation: see Note [Trials] in parts_trial.h.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>

#include "core/wait_context.h"

namespace horon {

// What is made and reduced at a time: two of them, a rank's and what it reads of the others', leave
// room in a second-level cache.
inline constexpr std::size_t kPartBytes = std::size_t{256} << 10;

// Belongs to the thread that made it, but for await_made().
class PartMaker {
 public:
  // `make(begin, end)` makes these bytes of the tensor, or more from `begin` on; returns up to
  // where. May throw.
  using Make = std::function<std::size_t(std::size_t begin, std::size_t end)>;

  PartMaker(std::size_t bytes, Make make) : bytes_(bytes), make_(std::move(make)) {}

  bool is_mine() const { return std::this_thread::get_id() == owner_; }
  bool has_more() const { return made_ < bytes_; }

  // Makes what is lacking of the first `bytes`.
  void make_until(std::size_t bytes);
  // Makes all, and tells those that wait. They are told if it throws, too: whoever reads the tensor
  // then finds what there is. Again, nothing.
  void finish();

  // On any other thread: waits until finish(). Throws TimeoutError, and what `check_interrupt`
  // throws.
  void await_made(const WaitContext& context);

 private:
  const std::thread::id owner_ = std::this_thread::get_id();
  const std::size_t bytes_;
  Make make_;  // empty after finish(): it holds what the tensor is made from
  std::size_t made_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_finished_ = false;  // guarded by mutex_
};

}  // namespace horon
