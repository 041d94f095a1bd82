#include "own_post.h"

#include <pybind11/pybind11.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "core/error.h"
#include "core/log.h"
#include "core/of_this_process.h"
#include "core/options.h"
#include "core/thread_name.h"
#include "process_exit.h"
#include "watch/watch_post.h"

namespace horon::torch_backend {
namespace {

// What a thread that has gone for the GIL brings back.
struct Errand {
  const Clock::time_point began = Clock::now();
  std::mutex mutex;
  std::condition_variable ended;
  bool is_done = false;  // guarded by mutex
  std::string text;      // guarded by mutex
};

std::string describe_python() {
  const CallOut call_out;  // the interpreter stays whole until this has come back
  if (Py_IsInitialized() == 0 || is_process_exiting()) {
    return "It is exiting.";
  }
  const pybind11::gil_scoped_acquire gil;
  try {
    return pybind11::module_::import("horon._where").attr("describe_threads")().cast<std::string>();
  } catch (const std::exception& error) {
    return concat("Its Python can not say where it is: ", error.what());
  }
}

// Belongs to the post's thread. Who holds the GIL may be what hangs, so another thread goes for it.
class PythonsWord {
 public:
  std::string operator()(const Deadline& deadline) {
    if (errand_ && has_ended(*errand_)) {
      errand_.reset();  // of an earlier question: it says where this process was
    }
    if (!errand_ && !send()) {
      return "";
    }
    std::unique_lock lock(errand_->mutex);
    if (!errand_->ended.wait_until(lock, deadline.at(), [&] { return errand_->is_done; })) {
      const std::chrono::duration<double> time = Clock::now() - errand_->began;
      return concat("Its Python does not answer: native code has kept the global interpreter lock ",
                    "for ", std::lround(time.count()), " s.");
    }
    const std::string text = std::move(errand_->text);
    lock.unlock();
    errand_.reset();
    return text;
  }

 private:
  static bool has_ended(Errand& errand) {
    const std::lock_guard lock(errand.mutex);
    return errand.is_done;
  }

  bool send() {
    errand_ = std::make_shared<Errand>();
    try {
      quiet_thread([errand = errand_] {
        name_this_thread("horon-tell");
        std::string text = describe_python();
        const std::lock_guard lock(errand->mutex);
        errand->text = std::move(text);
        errand->is_done = true;
        errand->ended.notify_all();
      }).detach();
      return true;
    } catch (const std::system_error&) {
      errand_.reset();
      return false;
    }
  }

  std::shared_ptr<Errand> errand_;
};

struct OwnPost {
  const std::uint32_t fork_generation = horon::fork_generation();
  std::unique_ptr<WatchPost> post;  // null: none
};

OwnPost* make_own_post() {
  auto own = std::make_unique<OwnPost>();
  if (watch_from_environment()) {
    try {
      own->post =
          std::make_unique<WatchPost>([word = std::make_shared<PythonsWord>()](
                                          const Deadline& deadline) { return (*word)(deadline); });
    } catch (const Error& error) {
      log_warning_once("watch", concat("this process can not be asked where it is when it is "
                                       "waited for: ",
                                       error.what()));
    }
  }
  return own.release();
}

const OwnPost& current_post() {
  static std::atomic<OwnPost*> current{nullptr};
  return of_this_process(current, make_own_post);
}

}  // namespace

std::uint64_t own_post() {
  const OwnPost& own = current_post();
  return own.post ? own.post->number() : 0;
}

DoorKey own_door() {
  const OwnPost& own = current_post();
  if (!own.post) {
    return {};
  }
  try {
    return own.post->open_door();
  } catch (const Error& error) {
    log_warning_once("door", concat("ranks on other hosts can not ask this process where it is ",
                                    "when it is waited for: ", error.what()));
    return {};
  }
}

void publish_own_post(const SharedGroup& group) {
  group.segment.words(group.peers.rank).watch_post.store(own_post(), std::memory_order_relaxed);
}

}  // namespace horon::torch_backend
