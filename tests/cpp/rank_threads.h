// The ranks of a group as threads of this process, and what they share.
//
// Catch2's assertions belong to one thread, so ranks report by throwing: see expect().
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <future>
#include <iostream>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "core/error.h"
#include "core/store.h"
#include "core/wait_context.h"
#include "shm/rendezvous.h"

#if defined(__SANITIZE_THREAD__)
#define HORON_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HORON_TSAN 1
#endif
#endif

namespace horon::testing {

#ifdef HORON_TSAN
inline constexpr bool kHasThreadSanitizer = true;
#else
inline constexpr bool kHasThreadSanitizer = false;
#endif

#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kHasAddressSanitizer = true;
#else
inline constexpr bool kHasAddressSanitizer = false;
#endif

// For waits that are expected to end: long enough for any machine.
inline Deadline patient() { return Deadline::after(std::chrono::seconds(80)); }

inline WaitContext patient_context() { return WaitContext{patient(), nullptr}; }

// For waits that are expected to fail.
inline Deadline soon() { return Deadline::after(std::chrono::milliseconds(150)); }

// For waits that are expected to fail because of one rank, when the others have come: they do, also
// on a machine that is busy with something else. Takes its time: run such cases with at_once().
inline Deadline after_the_others_came() { return Deadline::after(std::chrono::seconds(4)); }

// A rank's own assertion.
template <typename... Args>
void expect(bool condition, const Args&... message) {
  if (!condition) {
    throw std::logic_error(concat("expectation failed: ", message...));
  }
}

// By rank; null where the rank's body returned.
using Errors = std::vector<std::exception_ptr>;

inline std::string text_of(const std::exception_ptr& error) {
  if (!error) {
    return "";
  }
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  }
}

template <typename Expected>
bool threw(const std::exception_ptr& error) {
  if (!error) {
    return false;
  }
  try {
    std::rethrow_exception(error);
  } catch (const Expected&) {
    return true;
  } catch (...) {
    return false;
  }
}

// What `body` throws; null if nothing.
template <typename Body>
std::exception_ptr error_of(const Body& body) {
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// Calls body(rank) on one thread per rank. A hang ends the test program with a message: the threads
// could not be joined.
template <typename Body>
Errors run_ranks(int n_ranks, const Body& body) {
  std::vector<std::future<std::exception_ptr>> outcomes;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n_ranks; ++rank) {
    std::packaged_task<std::exception_ptr()> task(
        [&body, rank] { return error_of([&] { body(rank); }); });
    outcomes.push_back(task.get_future());
    threads.emplace_back(std::move(task));
  }
  const Deadline deadline = Deadline::after(std::chrono::seconds(110));
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].wait_until(deadline.at()) != std::future_status::ready) {
      std::cerr << "rank thread " << rank << " hangs; giving up\n";
      std::abort();
    }
  }
  Errors errors;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    threads[rank].join();
    errors.push_back(outcomes[rank].get());
  }
  return errors;
}

inline void require_no_errors(const Errors& errors) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    INFO("rank " << rank << ": " << text_of(errors[rank]));
    REQUIRE(!errors[rank]);
  }
}

// What body(i) returns, for each of n cases; all of them at the same time.
template <typename Body>
auto at_once(int n_cases, const Body& body) {
  std::vector<decltype(body(0))> results(static_cast<std::size_t>(n_cases));
  require_no_errors(
      run_ranks(n_cases, [&](int i) { results[static_cast<std::size_t>(i)] = body(i); }));
  return results;
}

template <typename Expected>
void require_all_threw(const Errors& errors) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    INFO("rank " << rank << " threw: " << text_of(errors[rank]));
    REQUIRE(threw<Expected>(errors[rank]));
  }
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A Store in this process's memory.
class MemoryStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }

  std::string get(const std::string& key, const Deadline& deadline) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, deadline.at(), [&] { return values_.count(key) != 0; })) {
      throw TimeoutError(concat("no key ", key));
    }
    return values_[key];
  }

  std::int64_t add(const std::string& key, std::int64_t amount) override {
    const std::lock_guard lock(mutex_);
    return counters_[key] += amount;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::map<std::string, std::string> values_;
  std::map<std::string, std::int64_t> counters_;
};

// So small that messages of a few kilobytes need pieces, rings wrap and rendezvous happens.
inline Options small_options() {
  Options options;
  options.inline_bytes = 256;
  options.buffer_bytes = 4096;
  options.ring_bytes = 4096;
  options.eager_bytes = 512;
  return options;
}

inline GroupIdentity identity_of(int rank, int n_ranks) {
  GroupIdentity identity;
  identity.rank = rank;
  identity.n_ranks = n_ranks;
  for (int peer = 0; peer < n_ranks; ++peer) {
    identity.global_ranks.push_back(peer);
  }
  return identity;
}

// n ranks that met through rendezvous() and share a segment.
class LocalGroup {
 public:
  // `access`: by rank, if the ranks shall have arenas.
  explicit LocalGroup(int n_ranks, const Options& options = small_options(),
                      std::vector<ArenaAccess> access = {})
      : groups_(static_cast<std::size_t>(n_ranks)), life_ends_(static_cast<std::size_t>(n_ranks)) {
    access.resize(static_cast<std::size_t>(n_ranks));
    MemoryStore store;
    const Errors errors = run_ranks(n_ranks, [&](int rank) {
      groups_[static_cast<std::size_t>(rank)] =
          rendezvous(store, identity_of(rank, n_ranks), options, patient(),
                     access[static_cast<std::size_t>(rank)]);
      expect(groups_[static_cast<std::size_t>(rank)] != nullptr, "the ranks share no memory");
    });
    require_no_errors(errors);
  }

  // Each rank's own mapping; under the thread sanitizer one mapping for all, so that it sees that
  // they touch the same memory.
  Segment* segment(int rank) const {
    return &groups_[kHasThreadSanitizer ? 0 : static_cast<std::size_t>(rank)]->segment;
  }
  const std::shared_ptr<SharedGroup>& shared(int rank) const {
    return groups_[static_cast<std::size_t>(rank)];
  }
  const GroupArenas* arenas(int rank) const {
    return &groups_[static_cast<std::size_t>(rank)]->arenas;
  }
  const Peers* peers(int rank) const { return &groups_[static_cast<std::size_t>(rank)]->peers; }

  // As on a machine with less than one core for each rank, with one, or with two. Call before the
  // ranks run.
  enum class Cores : std::uint8_t { kCrowd, kOneEach, kTwoEach };
  void set_cores(Cores cores) {
    for (const auto& group : groups_) {
      group->peers.is_crowded = cores == Cores::kCrowd;
      group->peers.has_spare_cores = cores == Cores::kTwoEach;
    }
  }

  // All ranks live in this process; kill(rank) shall look like the end of one. Call before the
  // ranks run.
  void make_mortal() {
    for (std::size_t rank = 0; rank < groups_.size(); ++rank) {
      int ends[2];
      REQUIRE(::pipe(ends) == 0);
      life_ends_[rank] = UniqueFd(ends[1]);
      const UniqueFd life(ends[0]);
      for (const auto& group : groups_) {
        group->peers.peers[rank].liveness_fd = UniqueFd(::dup(life.get()));
      }
    }
  }
  void kill(int rank) { life_ends_[static_cast<std::size_t>(rank)].reset(); }

 private:
  std::vector<std::shared_ptr<SharedGroup>> groups_;
  std::vector<UniqueFd> life_ends_;
};

}  // namespace horon::testing
