#include "work.h"

#include <optional>

#include "errors.h"
#include "finished_work.h"
#include "group.h"
#include "interrupt.h"
#include "process_exit.h"
#include "without_gil.h"

namespace horon::torch_backend {
namespace {

constexpr auto kNever = std::chrono::steady_clock::time_point::max();

// Of no use to c10d::Work without a title.
std::optional<std::vector<at::Tensor>> profiled(const char* title,
                                                const std::vector<at::Tensor>& inputs) {
  return title == nullptr ? std::nullopt : std::optional(inputs);
}

}  // namespace

std::uint64_t next_completion_key() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

HoronWork::HoronWork(Origin origin, const std::vector<at::Tensor>& inputs,
                     std::vector<at::Tensor> outputs)
    : c10d::Work(origin.rank, origin.op_type, origin.profiling_title,
                 profiled(origin.profiling_title, inputs)),
      origin_(std::move(origin)),
      completion_key_(next_completion_key()),
      outputs_(std::move(outputs)) {}

bool HoronWork::is_finished() const {
  const std::lock_guard lock(mutex_);
  return completed_;
}

bool HoronWork::isCompleted() {
  if (const auto group = origin_.group.lock(); group != nullptr && !is_finished()) {
    group->check_process("is_completed");
    const WithoutGil no_gil;
    origin_.mover == Mover::kLane ? group->lane()->poll() : group->p2p()->poll();
  }
  return is_finished();
}

bool HoronWork::leave_to_threads(Group& group) const {
  return origin_.mover == Mover::kMessages ? group.p2p()->watch() : group.lane()->hand_over();
}

void HoronWork::help_here(Group& group, std::chrono::steady_clock::time_point give_up) const {
  const bool has_limit = give_up != kNever;
  const auto is_done = [&] {
    return is_finished() || (has_limit && std::chrono::steady_clock::now() >= give_up);
  };
  if (origin_.mover == Mover::kMessages) {
    group.p2p()->help_until(is_done, interrupt_check(), this);
  } else {
    group.lane()->help_until(is_done);
  }
}

bool HoronWork::wait(std::chrono::milliseconds timeout) {
  const InterruptScope interrupts;
  const auto give_up = timeout > kNoTimeout ? std::chrono::steady_clock::now() + timeout : kNever;
  if (const auto group = origin_.group.lock(); group != nullptr && !is_finished()) {
    group->check_process("wait");
    try {
      // With a limit, the group's threads do it: a collective that runs here could not be given up
      // in time.
      if (timeout <= kNoTimeout || !leave_to_threads(*group)) {
        help_here(*group, give_up);
      }
    } catch (...) {
      rethrow_translated();
    }
  }
  const auto* check_interrupt = interrupt_check();
  std::unique_lock lock(mutex_);
  while (!completed_) {
    auto slice = std::chrono::steady_clock::duration(std::chrono::milliseconds(100));
    if (timeout > kNoTimeout) {
      slice = std::min(slice, give_up - std::chrono::steady_clock::now());
    }
    if (cv_.wait_for(lock, slice, [this] { return completed_; })) {
      break;
    }
    if (timeout > kNoTimeout && std::chrono::steady_clock::now() >= give_up) {
      C10_THROW_ERROR(DistBackendError, "horon: wait(timeout): Timed out waiting " +
                                            std::to_string(timeout.count()) + "ms for operation #" +
                                            std::to_string(origin_.sequence) +
                                            ", which goes on; wait again, or abort the group.");
    }
    if (check_interrupt != nullptr) {
      lock.unlock();
      (*check_interrupt)();
      lock.lock();
    }
  }
  lock.unlock();
  stay_if_process_exits();
  interrupts.rethrow();
  if (exception_) {  // final by now
    std::rethrow_exception(exception_);
  }
  return true;
}

std::vector<at::Tensor> HoronWork::result() { return outputs_; }

int HoronWork::sourceRank() const { return source_rank_.load(std::memory_order_relaxed); }

void HoronWork::abort() {
  if (const auto group = origin_.group.lock()) {
    group->abort("Work.abort() was called");
  }
}

c10::intrusive_ptr<c10::ivalue::Future> HoronWork::getFuture() {
  if (const auto group = origin_.group.lock(); group != nullptr && !is_finished()) {
    group->check_process("get_future");
    // Whoever waits for a future does not come by here any more. A callback on the lane's own
    // thread would be helped by nobody, nor is anybody where the system gives no thread.
    const bool is_alone = origin_.mover == Mover::kLane && group->lane()->on_progress_thread();
    if (is_alone || !leave_to_threads(*group)) {
      const WithoutGil no_gil;
      help_here(*group, kNever);
    }
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool mark_now = false;
  {
    const std::lock_guard lock(mutex_);
    if (!future_) {
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
    if (completed_ && !is_future_marked_) {
      is_future_marked_ = true;
      mark_now = true;
    }
    future = future_;
  }
  if (mark_now) {
    mark_future(future);
  }
  return future;
}

void HoronWork::mark_future(const c10::intrusive_ptr<c10::ivalue::Future>& future) const {
  if (exception_) {  // final by now
    future->setError(exception_);
  } else {
    future->markCompleted(at::IValue(outputs_));
  }
}

void HoronWork::complete(std::exception_ptr error) {
  if (!error && origin_.hooks) {
    // Before anybody is woken: who has waited may look at the flight recorder next.
    origin_.hooks->on_completion.call_all(completion_key_);
  }
  finish(std::move(error));
}

void HoronWork::call_back() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (future_ && !is_future_marked_) {
      is_future_marked_ = true;
      future = future_;
    }
  }
  if (future) {
    mark_future(future);
  }
}

}  // namespace horon::torch_backend
