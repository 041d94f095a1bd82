#include "gloo_meeting.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <utility>

#include "core/deadline.h"
#include "core/error.h"

namespace horon::torch_backend {
namespace {

constexpr const char* kNoteKey = "failed";

// Waits in slices, and looks around between them.
class MeetingStore final : public c10d::PrefixStore {
 public:
  MeetingStore(std::string prefix, c10::intrusive_ptr<c10d::Store> store,
               std::function<void()> look_around)
      : PrefixStore(std::move(prefix), std::move(store)), look_around_(std::move(look_around)) {}

  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }

  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    constexpr std::chrono::milliseconds kSlice{1000};
    const Deadline deadline = Deadline::after(timeout);
    while (true) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
      if (left <= kSlice) {
        PrefixStore::wait(keys, std::max(left, std::chrono::milliseconds(1)));
        return;
      }
      const auto begin = Clock::now();
      try {
        PrefixStore::wait(keys, kSlice);
        return;
      } catch (const std::exception&) {
        if (Clock::now() - begin < kSlice / 4) {
          throw;  // a store that is gone, not one that waits
        }
      }
      look_around_();
      if (const std::string note = this->note(); !note.empty()) {
        throw GroupError(note);
      }
    }
  }

  // Empty while there is none.
  std::string note() {
    if (!check({kNoteKey})) {
      return "";
    }
    const std::vector<uint8_t> text = get(kNoteKey);
    return {text.begin(), text.end()};
  }

  void leave_note(const std::string& text) {
    try {
      set(kNoteKey, std::vector<uint8_t>(text.begin(), text.end()));
    } catch (const std::exception&) {  // a store that is gone: the others notice that themselves
    }
  }

 private:
  const std::function<void()> look_around_;
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
                                                  int rank, int n_ranks,
                                                  const GlooFactory& make_gloo,
                                                  std::function<void()> look_around) {
  // Groups of one name come again on the same store.
  const std::int64_t generation = store->add(concat("gloo/generation/", rank), 1);
  const auto meeting =
      c10::make_intrusive<MeetingStore>(concat("gloo/", generation), store, std::move(look_around));
  std::string failure;
  try {
    return make_gloo(meeting);
  } catch (pybind11::error_already_set& error) {
    failure = message_of(error);
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  }
  const std::string note = meeting->note();
  if (!note.empty()) {
    throw GroupError(note);
  }
  failure = concat("rank ", rank, " could not make the Gloo group that carries the bytes of a ",
                   "group of ", n_ranks, " ranks that do not all share memory: ", failure);
  meeting->leave_note(failure);
  throw GroupError(failure);
}

}  // namespace horon::torch_backend
