// The memory that the ranks of a window share, and how long it stays theirs.
//
// Note [Lent memory]
// A window's tensor lies in its rank's arena, and any peer may store into it at any time, without
// asking. So the tensor's block must not be used for anything else while a peer could still do
// that: its rank lends it. Each peer lets go of what it was lent when its window and all tensors
// that map the rank's memory are gone. That is a word beside the signals, which the peer sets and
// nobody waits for, so that windows can be dropped at any time and in any order. The owner looks at
// the words when it makes or drops a window and when it allocates in the arena, and takes back what
// everybody has let go of. Who has died has let go, too. A tensor that is freed, resized or moved
// in the meantime leaves a pinned block behind.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "core/inline_vector.h"
#include "shm/arena.h"

namespace horon {

struct SharedGroup;

// What one source and one target of a window have between them. It lies in the target's arena;
// memory of zeros is a valid one. `value` and `waiters`: see wait_for_word().
struct alignas(64) SignalWords {
  std::atomic<std::uint32_t> value;    // changes with every signal
  std::atomic<std::uint32_t> waiters;  // of the target
  std::atomic<std::uint64_t> raised;   // signals that the source has ever raised
  std::atomic<std::uint32_t> let_go;   // 1: the source stores nothing any more
};

// What a rank tells the others about its part of a window. Plain data.
struct WindowPart {
  static constexpr std::uint32_t kMaxDimensions = 8;

  std::uint64_t count = 0;         // elements
  std::uint64_t data_offset = 0;   // in the rank's arena, if count > 0
  std::uint64_t words_offset = 0;  // SignalWords by source
  std::uint64_t n_dimensions = 0;
  std::int64_t sizes[kMaxDimensions] = {};
};

// One rank's own part, as long as it is lent.
// Thread safety: immutable; the words are atomic.
class WindowMemory {
 public:
  // Throws Error when the arena has no room for the words.
  // Requires: `data` is null or in the arena of `group`'s own rank.
  WindowMemory(std::shared_ptr<const SharedGroup> group, const std::byte* data);
  ~WindowMemory();
  WindowMemory(const WindowMemory&) = delete;
  WindowMemory& operator=(const WindowMemory&) = delete;

  std::uint64_t words_offset() const;
  // The owner itself does not use it any more.
  void let_go_of_own() const;
  // Whether nobody can store into it any more.
  bool is_let_go() const;

 private:
  const std::shared_ptr<const SharedGroup> group_;
  const std::shared_ptr<Arena> arena_;
  SignalWords* const words_;  // by source
  std::byte* const pinned_;   // the tensor's block; null: none
};

// Everything that a process has lent. See Note [Lent memory].
// Thread safety: all methods.
class LentMemory {
 public:
  void add(std::shared_ptr<WindowMemory> memory);
  // At once: nobody was told of it.
  void take_back(const WindowMemory* memory);
  // Takes back what everybody has let go of.
  void sweep() noexcept;
  std::size_t n_lent() const { return n_lent_.load(std::memory_order_relaxed); }

 private:
  std::mutex mutex_;
  std::list<std::shared_ptr<WindowMemory>> lent_;  // guarded by mutex_
  std::atomic<std::size_t> n_lent_{0};             // so that sweep() costs nothing without windows
};

// All parts of a window, as one rank sees them. While it lives, the peers' memory is mapped and
// lent to this rank.
// Thread safety: immutable; memory is what it is.
class WindowAccess {
 public:
  // `parts` by rank. Throws Error when they make no sense.
  WindowAccess(std::shared_ptr<const SharedGroup> group, std::shared_ptr<LentMemory> lent,
               std::vector<WindowPart> parts, std::size_t element_bytes);
  // Lets go.
  ~WindowAccess();
  WindowAccess(const WindowAccess&) = delete;
  WindowAccess& operator=(const WindowAccess&) = delete;

  const SharedGroup& group() const { return *group_; }
  const WindowPart& part(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }
  std::size_t element_bytes() const { return element_bytes_; }
  // A rank's tensor; null when it has no elements.
  std::byte* data(int rank) const { return data_[static_cast<std::size_t>(rank)]; }
  SignalWords& words(int source, int target) const {
    return words_[static_cast<std::size_t>(target)][source];
  }

 private:
  const std::uint32_t fork_generation_;
  const std::shared_ptr<const SharedGroup> group_;
  const std::shared_ptr<LentMemory> lent_;
  const std::vector<WindowPart> parts_;
  const std::size_t element_bytes_;
  InlineVector<std::byte*, 8> data_;
  InlineVector<SignalWords*, 8> words_;  // by target
};

}  // namespace horon
