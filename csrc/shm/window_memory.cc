#include "shm/window_memory.h"

#include <new>

#include "core/fork_guard.h"
#include "shm/rendezvous.h"

namespace horon {
namespace {

SignalWords* allocate_words(Arena& arena, int n_ranks) {
  const auto n = static_cast<std::size_t>(n_ranks);
  std::byte* const memory = arena.allocate(n * sizeof(SignalWords));
  auto* const words = reinterpret_cast<SignalWords*>(memory);
  for (std::size_t source = 0; source < n; ++source) {
    new (words + source) SignalWords{};
  }
  return words;
}

}  // namespace

WindowMemory::WindowMemory(std::shared_ptr<const SharedGroup> group, const std::byte* data)
    : group_(std::move(group)),
      arena_(group_->arenas.own()),
      words_(allocate_words(*arena_, group_->peers.n_ranks())),
      pinned_(data == nullptr ? nullptr : arena_->pin(data)) {}

WindowMemory::~WindowMemory() {
  // Both do nothing in a forked child.
  arena_->unpin(pinned_);
  arena_->free(reinterpret_cast<std::byte*>(words_));
}

std::uint64_t WindowMemory::words_offset() const { return arena_->offset_of(words_); }

void WindowMemory::let_go_of_own() const {
  words_[group_->peers.rank].let_go.store(1, std::memory_order_release);
}

bool WindowMemory::is_let_go() const {
  const Peers& peers = group_->peers;
  const auto has_let_go = [&](int source) {
    // Acquire: what the source stored, it stored before.
    return words_[source].let_go.load(std::memory_order_acquire) != 0;
  };
  // Itself first: that spares a living window the system calls below.
  if (!has_let_go(peers.rank)) {
    return false;
  }
  for (int source = 0; source < peers.n_ranks(); ++source) {
    if (!has_let_go(source) &&
        !has_ended(peers.peers[static_cast<std::size_t>(source)].liveness_fd.get())) {
      return false;
    }
  }
  return true;
}

void LentMemory::add(std::shared_ptr<WindowMemory> memory) {
  const std::lock_guard lock(mutex_);
  lent_.push_back(std::move(memory));
  n_lent_.store(lent_.size(), std::memory_order_relaxed);
}

void LentMemory::take_back(const WindowMemory* memory) {
  std::list<std::shared_ptr<WindowMemory>> taken;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  for (auto entry = lent_.begin(); entry != lent_.end(); ++entry) {
    if (entry->get() == memory) {
      taken.splice(taken.end(), lent_, entry);
      break;
    }
  }
  n_lent_.store(lent_.size(), std::memory_order_relaxed);
}

void LentMemory::sweep() noexcept {
  if (n_lent() == 0) {
    return;
  }
  std::list<std::shared_ptr<WindowMemory>> taken;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  for (auto entry = lent_.begin(); entry != lent_.end();) {
    const auto next = std::next(entry);
    if ((*entry)->is_let_go()) {
      taken.splice(taken.end(), lent_, entry);
    }
    entry = next;
  }
  n_lent_.store(lent_.size(), std::memory_order_relaxed);
}

WindowAccess::WindowAccess(std::shared_ptr<const SharedGroup> group,
                           std::shared_ptr<LentMemory> lent, std::vector<WindowPart> parts,
                           std::size_t element_bytes)
    : fork_generation_(fork_generation()),
      group_(std::move(group)),
      lent_(std::move(lent)),
      parts_(std::move(parts)),
      element_bytes_(element_bytes) {
  const GroupArenas& arenas = group_->arenas;
  const std::uint64_t words_bytes = parts_.size() * sizeof(SignalWords);
  for (std::size_t rank = 0; rank < parts_.size(); ++rank) {
    const WindowPart& part = parts_[rank];
    const int r = static_cast<int>(rank);
    words_.push_back(reinterpret_cast<SignalWords*>(arenas.at(r, part.words_offset, words_bytes)));
    data_.push_back(part.count == 0 ? nullptr
                                    : arenas.at(r, part.data_offset, part.count * element_bytes_));
  }
}

WindowAccess::~WindowAccess() {
  if (fork_generation_ != fork_generation()) {
    return;  // the parent's to let go of
  }
  for (std::size_t target = 0; target < words_.size(); ++target) {
    // Release: everything that this rank has stored comes before.
    words_[target][group_->peers.rank].let_go.store(1, std::memory_order_release);
  }
  lent_->sweep();
}

}  // namespace horon
