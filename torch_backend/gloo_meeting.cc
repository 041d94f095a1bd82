#include "gloo_meeting.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "ask_again.h"
#include "core/deadline.h"
#include "core/error.h"
#include "core/log.h"

namespace horon::torch_backend {
namespace {

constexpr const char* kNoteKey = "failed";

// Asks again and again, see Note [Waiting at a store], and looks around in between. Gloo keeps it
// for connections that it makes later: once the ranks have met, it is a plain store.
class MeetingStore final : public c10d::PrefixStore {
 public:
  MeetingStore(std::string prefix, c10::intrusive_ptr<c10d::Store> store,
               std::function<void()> look_around)
      : PrefixStore(std::move(prefix), std::move(store)), look_around_(std::move(look_around)) {}

  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }

  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    const Deadline deadline = Deadline::after(timeout);
    if (have_met()) {
      PrefixStore::wait(keys, timeout);
      return;
    }
    const auto are_there = [&] {
      try {
        return check(keys);
      } catch (const std::exception&) {  // a store that is gone, or without check()
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
        PrefixStore::wait(keys, std::max(left, std::chrono::milliseconds(1)));
        return true;
      }
    };
    const auto look = [&] { look_around(); };
    TORCH_CHECK_WITH(DistStoreError, ask_again(are_there, look, deadline), "Timed out waiting ",
                     timeout.count(), "ms for '", c10::Join("', '", keys), "' in the store.");
  }

  // `look_around` is not called from now on.
  void set_have_met() { have_met_.store(true, std::memory_order_release); }

  // Empty while there is none, and where the store is gone, which others say better.
  std::string note() {
    try {
      if (check({kNoteKey})) {
        const std::vector<uint8_t> text = get(kNoteKey);
        return {text.begin(), text.end()};
      }
    } catch (const std::exception&) {
      return "";
    }
    return "";
  }

  void leave_note(const std::string& text) {
    try {
      set(kNoteKey, std::vector<uint8_t>(text.begin(), text.end()));
    } catch (const std::exception& error) {
      log_warning(concat("the other ranks were not told that ", text,
                         ", because the store failed: ", error.what()));
    }
  }

 private:
  bool have_met() const { return have_met_.load(std::memory_order_acquire); }

  void look_around() {
    if (have_met()) {
      return;
    }
    look_around_();
    if (const std::string note = this->note(); !note.empty()) {
      throw GroupError(note);
    }
  }

  const std::function<void()> look_around_;
  std::atomic<bool> have_met_{false};
};

// What an exception of Python's says; rethrows Ctrl-C and the like.
std::string message_of(pybind11::error_already_set& error) {
  const pybind11::gil_scoped_acquire gil;
  if (!error.matches(PyExc_Exception)) {
    throw;
  }
  return pybind11::str(error.value());
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int n_ranks, std::int64_t attempt,
                                                  const GlooMaker& make_gloo,
                                                  const Deadline& deadline,
                                                  std::function<void()> look_around, int number) {
  const auto meeting =
      c10::make_intrusive<MeetingStore>(concat("gloo/", attempt), store, std::move(look_around));
  std::string failure;
  try {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
    auto group = make_gloo(meeting, rank, n_ranks, std::max(left, std::chrono::milliseconds(1)));
    meeting->set_have_met();
    return group;
  } catch (pybind11::error_already_set& error) {
    failure = message_of(error);
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  }
  const std::string note = meeting->note();
  if (!note.empty()) {
    throw GroupError(note);
  }
  failure = concat("rank ", number < 0 ? rank : number,
                   " could not make the Gloo group that carries the bytes of a ", "group of ",
                   n_ranks, " ranks that do not all share memory: ", failure);
  meeting->leave_note(failure);
  throw GroupError(failure);
}

}  // namespace horon::torch_backend
