// Stores that do not wait for the cache lines they go to.
//
// Note [Lines for writing]
// A store to a line that is not in the core's own caches first fetches the line; memcpy does so
// line by line, and `rep movsb`, its way for large copies, not much earlier. What limits large
// operations is how many lines a core can wait for at once, not the memory. Asking for the lines
// (PREFETCHW) a kilobyte before their turn took 5 % off an all_reduce of 16 and 64 MiB between two
// cores of a Xeon (docs/performance.md). Where the lines have just been read, as those of a peer's
// tensor in the arena, it made things slower.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace horon {

// How far ahead lines are asked for: long enough for a line to come from another core, short
// enough for what has come to stay in the first-level cache.
inline constexpr std::size_t kAheadBytes = 1024;

// Starts to fetch the lines of [at, at + bytes) for writing. A hint: any address is allowed.
inline void prefetch_for_write(const std::byte* at, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  for (std::size_t done = 0; done < bytes; done += kLine) {
#if defined(__x86_64__)
    // GCC's builtin gives this instruction only with -mprfchw. CPUs without it take it for a NOP.
    asm volatile("prefetchw %0" : : "m"(at[done]));
#else
    __builtin_prefetch(at + done, 1);
#endif
  }
}

// Shorter copies are left to memcpy.
inline constexpr std::size_t kLeastCopyAhead = std::size_t{32} * 1024;

// memcpy, faster for large pieces whose lines are not in this core's caches. Takes empty ones.
inline void copy_ahead(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes < kLeastCopyAhead) {
    if (bytes > 0) {  // an empty tensor has no address, and memcpy takes no null pointer
      std::memcpy(to, from, bytes);
    }
    return;
  }
  prefetch_for_write(to, kAheadBytes);
  for (std::size_t done = 0; done < bytes;) {
    std::size_t part = std::min(bytes - done, kAheadBytes);
    const std::size_t next = std::min(bytes - done - part, kAheadBytes);
    prefetch_for_write(to + done + part, next);
    asm("" : "+r"(part));  // a size that GCC knew would become `rep movsq`, slower than libc here
    std::memcpy(to + done, from + done, part);
    done += part;
  }
}

}  // namespace horon
