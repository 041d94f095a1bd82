#include "store_adapter.h"

#include <algorithm>

#include "core/error.h"
#include "interrupt.h"

namespace horon::torch_backend {

// A store that fails may have been served by a rank that has died, which is then the news.
template <typename Call>
auto StoreAdapter::ask(const Call& call) {
  try {
    return call();
  } catch (const std::exception&) {
    look_around();
    throw;
  }
}

void StoreAdapter::set(const std::string& key, const std::string& value) {
  ask([&] { store_->set(key, std::vector<uint8_t>(value.begin(), value.end())); });
}

std::string StoreAdapter::get(const std::string& key, const Deadline& deadline) {
  // In slices where somebody wants to look around: at Ctrl-C on the main thread, or at the peers.
  constexpr std::chrono::milliseconds kSlice{1000};
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
    const auto slice = interrupt_check() != nullptr || check_ ? kSlice : left;
    const bool is_last = left <= slice;
    try {
      store_->wait({key}, std::max(std::min(left, slice), std::chrono::milliseconds(1)));
      break;
    } catch (const std::exception& error) {
      if (is_last && deadline.has_passed()) {
        throw TimeoutError(concat("Timed out waiting ", deadline.timeout().count(), "ms for '", key,
                                  "' in the store: ", error.what()));
      }
      // A store that is gone fails at once, again and again; one that waits takes its slice of
      // time.
      const auto waited = left - std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
      if (waited < std::min(left, slice) / 4) {
        look_around();
        throw Error(concat("the rendezvous store failed: ", error.what()));
      }
    }
    try {
      look_around();
    } catch (const PeerLostError&) {
      // Ranks that have met may end at once, while this one has yet to read what they said.
      if (!is_there(key)) {
        throw;
      }
    }
  }
  const std::vector<uint8_t> value = store_->get(key);
  return {value.begin(), value.end()};
}

bool StoreAdapter::is_there(const std::string& key) {
  try {
    store_->wait({key}, std::chrono::milliseconds(100));
    return true;
  } catch (const std::exception&) {  // a store that is gone has nothing either
    return false;
  }
}

void StoreAdapter::look_around() {
  if (const auto* check = interrupt_check()) {
    (*check)();
  }
  if (check_) {
    check_();
  }
}

std::int64_t StoreAdapter::add(const std::string& key, std::int64_t amount) {
  return ask([&] { return store_->add(key, amount); });
}

}  // namespace horon::torch_backend
