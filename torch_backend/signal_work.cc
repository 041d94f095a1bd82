#include "signal_work.h"

#if HORON_HAS_WINDOW

#include "core/error.h"
#include "errors.h"
#include "interrupt.h"
#include "process_exit.h"

namespace horon::torch_backend {

SignalWork::SignalWork(int rank, std::shared_ptr<horon::Window> window, int source,
                       const Deadline& deadline)
    : c10d::Work(rank, c10d::OpType::UNKNOWN),
      window_(std::move(window)),
      source_(source),
      deadline_(deadline),
      signal_(window_->expect_signal(source)) {}

bool SignalWork::is_finished() const {
  const std::lock_guard lock(mutex_);
  return completed_;
}

void SignalWork::end(std::exception_ptr error) {
  const std::lock_guard lock(ending_);
  if (is_finished()) {
    return;
  }
  if (error && !window_->forget(source_, *signal_)) {
    error = nullptr;  // it came at the last moment
  }
  finish(translated(error));
}

bool SignalWork::isCompleted() {
  if (is_finished()) {
    return true;
  }
  if (window_->look_for(source_, *signal_)) {
    end(nullptr);
    return true;
  }
  try {
    window_->check_wait(source_, *signal_, deadline_);
  } catch (...) {
    end(std::current_exception());
  }
  return is_finished();
}

bool SignalWork::wait(std::chrono::milliseconds timeout) {
  const Deadline patience = Deadline::after(timeout);
  const bool may_give_up = timeout > kNoTimeout && patience.at() < deadline_.at();
  if (!is_finished()) {
    const InterruptScope interrupts;
    try {
      const WaitContext context{may_give_up ? patience : deadline_, interrupt_check(), true};
      window_->await(source_, *signal_, context);
      end(nullptr);
    } catch (const TimeoutError&) {
      if (may_give_up) {
        stay_if_process_exits();
        C10_THROW_ERROR(DistBackendError,
                        concat("horon: wait(timeout): Timed out waiting ", timeout.count(),
                               "ms for a signal from rank ", source_,
                               ", which is still expected; wait again."));
      }
      end(std::current_exception());
    } catch (const Error&) {
      end(std::current_exception());
    } catch (...) {  // a signal handler's: the wait can be repeated
      stay_if_process_exits();
      throw;
    }
    stay_if_process_exits();
    interrupts.rethrow();
  }
  const std::exception_ptr error = exception();
  if (error) {
    std::rethrow_exception(error);
  }
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> SignalWork::getFuture() {
  TORCH_CHECK(isCompleted(), "horon: window.wait_signal: a future exists only once the signal has ",
              "come: no thread waits for it. Call wait() instead, or poll is_completed().");
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  if (const std::exception_ptr error = exception()) {
    future->setError(error);
  } else {
    future->markCompleted(at::IValue(std::vector<at::Tensor>()));
  }
  return future;
}

}  // namespace horon::torch_backend

#endif  // HORON_HAS_WINDOW
