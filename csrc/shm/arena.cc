#include "shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "core/error.h"
#include "core/fork_guard.h"
#include "core/log.h"
#include "core/random_nonce.h"
#include "core/round_up.h"
#include "shm/in_pieces.h"
#include "shm/memory_limit.h"

namespace horon {
namespace {

std::size_t whole_chunks(std::size_t bytes) {
  return std::max(Arena::kChunkBytes, round_up(bytes, Arena::kChunkBytes));
}

std::uint64_t first_whole_chunk(const ByteRange& range) {
  return (range.offset + Arena::kChunkBytes - 1) / Arena::kChunkBytes;
}

std::uint64_t end_of_whole_chunks(const ByteRange& range) {
  return range.end() / Arena::kChunkBytes;
}

// 0, or errno; then nothing has been allocated.
int allocate_pages(int file, int mode, std::uint64_t offset, std::uint64_t bytes) {
  const auto allocate = [&](int how, std::uint64_t at, std::uint64_t length) {
    const bool is_done =
        ::fallocate(file, how, static_cast<off_t>(at), static_cast<off_t>(length)) == 0;
    return is_done ? 0 : errno;
  };
  const auto act = [&](std::uint64_t at, std::uint64_t length) {
    return allocate(mode, at, length);
  };
  std::uint64_t done = 0;
  const int error = in_pieces(offset, bytes, act, &done);
  if (error != 0 && done > 0 && mode == 0) {
    (void)allocate(FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, done);
  }
  return error;
}

}  // namespace

Arena::Arena(std::size_t budget_bytes)
    : id_{random_nonce(), random_nonce()},
      fork_generation_(fork_generation()),
      file_(create_shared_file(whole_chunks(budget_bytes), 0)),
      mapping_(file_.get(), whole_chunks(budget_bytes), Mapping::Pages::kLater),
      ranges_(mapping_.bytes()),
      reserved_(mapping_.bytes() / kChunkBytes, false) {
#ifdef MADV_HUGEPAGE
  // Where the administrator allows it for shared memory ("advise"), it saves page faults and
  // address translations; elsewhere it does nothing.
  (void)::madvise(mapping_.data(), mapping_.bytes(), MADV_HUGEPAGE);
#endif
}

Arena::~Arena() = default;

std::byte* Arena::allocate(std::size_t bytes) {
  HORON_CHECK(fork_generation_ == fork_generation(),
              "arena: this process was forked from the one that the arena belongs to");
  const std::lock_guard lock(mutex_);
  const auto block = ranges_.allocate(bytes);
  if (!block) {
    throw_budget_spent(bytes);
  }
  try {
    reserve(*block);
  } catch (...) {
    ranges_.free(block->offset);
    throw;
  }
  return mapping_.data() + block->offset;
}

void Arena::free(std::byte* data) noexcept {
  // In a child the mutex may be held by a thread that exists no more.
  if (fork_generation_ != fork_generation() || !contains(data, 0)) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (const auto range = ranges_.free(offset_of(data))) {
    trim(*range);
  }
}

void Arena::quarantine(const void* data) {
  if (fork_generation_ == fork_generation() && contains(data, 0)) {
    const std::lock_guard lock(mutex_);
    ranges_.quarantine(offset_of(data));
  }
}

std::byte* Arena::pin(const void* data) {
  if (fork_generation_ != fork_generation() || !contains(data, 0)) {
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  const auto start = ranges_.pin(offset_of(data));
  return start ? mapping_.data() + *start : nullptr;
}

void Arena::unpin(std::byte* block) noexcept {
  if (fork_generation_ != fork_generation() || !contains(block, 0)) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (const auto range = ranges_.unpin(offset_of(block))) {
    trim(*range);
  }
}

bool Arena::become_private() noexcept {
  // Where the system counts every private page (overcommit_memory = 2), the child can only read.
  for (const int protection : {PROT_READ | PROT_WRITE, PROT_READ}) {
    if (::mmap(mapping_.data(), mapping_.bytes(), protection,
               MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file_.get(), 0) != MAP_FAILED) {
      return true;
    }
  }
  return false;
}

ArenaStatistics Arena::statistics() const {
  const std::lock_guard lock(mutex_);
  return {ranges_.capacity(), ranges_.used_bytes(), reserved_bytes_, ranges_.quarantined_bytes()};
}

// Makes sure that every page of the block exists, so that touching it can not be a SIGBUS.
void Arena::reserve(const ByteRange& block) {
  const std::uint64_t begin = block.offset / kChunkBytes;
  const std::uint64_t end = (block.end() + kChunkBytes - 1) / kChunkBytes;
  std::uint64_t missing = 0;
  for (std::uint64_t chunk = begin; chunk < end; ++chunk) {
    missing += reserved_[chunk] ? 0 : kChunkBytes;
  }
  if (missing == 0) {
    return;
  }
  if (const auto refusal = why_memory_is_short(missing)) {
    throw Error(concat("arena: no memory for a tensor of ", block.bytes, " bytes: ", *refusal,
                       " The arena holds ", reserved_bytes_, " bytes of memory now. Free tensors, ",
                       "or make fewer in the arena."));
  }
  for (std::uint64_t chunk = begin; chunk < end; ++chunk) {
    if (reserved_[chunk]) {
      continue;
    }
    std::uint64_t run_end = chunk + 1;
    while (run_end < end && !reserved_[run_end]) {
      ++run_end;
    }
    const std::uint64_t bytes = (run_end - chunk) * kChunkBytes;
    const int error = allocate_pages(file_.get(), 0, chunk * kChunkBytes, bytes);
    HORON_CHECK(error == 0, "arena: ", system_error_text("fallocate", error),
                ": could not reserve ", bytes, " bytes of shared memory. Free tensors, or lower ",
                "HORON_ARENA_BYTES.");
#ifdef MADV_POPULATE_WRITE
    // Page faults one by one would cost more later. Unknown to kernels before 5.14: no harm.
    (void)::madvise(mapping_.data() + chunk * kChunkBytes, bytes, MADV_POPULATE_WRITE);
#endif
    std::fill(reserved_.begin() + static_cast<std::ptrdiff_t>(chunk),
              reserved_.begin() + static_cast<std::ptrdiff_t>(run_end), true);
    reserved_bytes_ += bytes;
    chunk = run_end - 1;
  }
}

// Gives whole free chunks back to the system when more is kept than is worth it.
void Arena::trim(const ByteRange& freed) noexcept {
  const auto keeps_too_much = [&] {
    const std::uint64_t used = ranges_.used_bytes();
    return reserved_bytes_ - used > std::max(kKeptFreeBytes, used);
  };
  // Without a new whole chunk there is nothing to give back that was not there before.
  if (!keeps_too_much() || first_whole_chunk(freed) >= end_of_whole_chunks(freed)) {
    return;
  }
  // From the end: best fit prefers what lies in front, so that is what will be wanted again.
  const auto& free_ranges = ranges_.free_ranges();
  for (auto next = free_ranges.rbegin(); next != free_ranges.rend(); ++next) {
    const ByteRange range{next->first, next->second};
    for (std::uint64_t end = end_of_whole_chunks(range); end > first_whole_chunk(range); --end) {
      const std::uint64_t chunk = end - 1;
      if (!reserved_[chunk]) {
        continue;
      }
      if (!keeps_too_much()) {
        return;
      }
      if (allocate_pages(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                         chunk * kChunkBytes, kChunkBytes) != 0) {
        return;  // the memory stays reserved, and the arena works on
      }
      reserved_[chunk] = false;
      reserved_bytes_ -= kChunkBytes;
    }
  }
}

void Arena::throw_budget_spent(std::size_t bytes) const {
  const std::uint64_t quarantined = ranges_.quarantined_bytes();
  throw Error(concat("arena: no room for ", bytes, " bytes: ", ranges_.used_bytes(), " of ",
                     ranges_.capacity(), " are in use",
                     quarantined > 0
                         ? concat(" (", quarantined, " of them lost to operations that failed)")
                         : std::string(),
                     ", and the largest free part has ", ranges_.largest_free_bytes(),
                     " bytes. Free tensors, or raise HORON_ARENA_BYTES."));
}

}  // namespace horon
