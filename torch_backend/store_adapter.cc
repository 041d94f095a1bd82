#include "store_adapter.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "ask_again.h"
#include "core/error.h"
#include "interrupt.h"

namespace horon::torch_backend {
namespace {

const char* text_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

std::string failure_of_store(const std::exception& error) {
  return concat("the rendezvous store failed: ", text_of(error),
                ". Who holds it has ended or can not be reached: with torchrun the agent on the ",
                "first host, else most likely rank 0; look at what that one said.");
}

}  // namespace

// A store that fails may have been served by a rank that has died, which is then the news.
template <typename Call>
auto StoreAdapter::ask(const Call& call) {
  try {
    return call();
  } catch (const c10::Error& error) {
    look_around();
    throw Error(failure_of_store(error));
  } catch (const std::exception&) {
    look_around();
    throw;
  }
}

void StoreAdapter::set(const std::string& key, const std::string& value) {
  ask([&] { store_->set(key, std::vector<uint8_t>(value.begin(), value.end())); });
}

std::string StoreAdapter::get(const std::string& key, const Deadline& deadline) {
  if (!ask_again([&] { return is_there(key, deadline); }, [&] { look_around_for(key); },
                 deadline)) {
    throw TimeoutError(concat("Timed out waiting ", deadline.timeout().count(), "ms for '", key,
                              "' in the store."));
  }
  const std::vector<uint8_t> value = store_->get(key);
  return {value.begin(), value.end()};
}

bool StoreAdapter::is_there(const std::string& key, const Deadline& deadline) {
  try {
    return store_->check({key});
  } catch (const std::exception&) {
    // Gone, which wait() will say; or written in Python, without check().
    wait_in_slices(key, deadline);
    return true;
  }
}

void StoreAdapter::wait_in_slices(const std::string& key, const Deadline& deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
    const auto slice = interrupt_check() != nullptr || check_ ? kStoreLookAround : left;
    const bool is_last = left <= slice;
    try {
      store_->wait({key}, std::max(std::min(left, slice), std::chrono::milliseconds(1)));
      return;
    } catch (const std::exception& error) {
      if (is_last && deadline.has_passed()) {
        throw TimeoutError(concat("Timed out waiting ", deadline.timeout().count(), "ms for '", key,
                                  "' in the store: ", text_of(error)));
      }
      // A store that is gone fails at once, again and again; one that waits takes its slice of
      // time.
      const auto waited = left - std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
      if (waited < std::min(left, slice) / 4) {
        look_around();
        throw Error(failure_of_store(error));
      }
    }
    look_around_for(key);
  }
}

void StoreAdapter::look_around_for(const std::string& key) {
  try {
    look_around();
  } catch (const PeerLostError&) {
    // Ranks that have met may end at once, while this one has yet to read what they said.
    if (!comes_soon(key)) {
      throw;
    }
  }
}

bool StoreAdapter::comes_soon(const std::string& key) {
  const Deadline soon = Deadline::after(std::chrono::milliseconds(100));
  try {
    while (!soon.has_passed()) {
      if (is_there(key, soon)) {
        return true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  } catch (const Error&) {
    return false;  // a store that is gone has nothing either
  }
  return false;
}

void StoreAdapter::look_around() {
  if (const auto* check = interrupt_check()) {
    (*check)();
  }
  if (check_) {
    check_();
  }
}

std::string StoreAdapter::set_first(const std::string& key, const std::string& value) {
  return ask([&] { return store_->compareSet(key, "", value); });
}

std::int64_t StoreAdapter::add(const std::string& key, std::int64_t amount) {
  return ask([&] { return store_->add(key, amount); });
}

}  // namespace horon::torch_backend
