// Copies that do not wait for the cache lines they store to.
//
// Note [Lines for writing]
// A store to a line that is not in the core's own caches first fetches the line, and what limits
// large operations is how many lines a core can wait for at once, not the memory. So lines are
// asked for (PREFETCHW) a kilobyte before their turn, one by one: a burst of them takes the places
// of the loads. And a line is stored with the widest vectors that the CPU has, because stores that
// wait fill the store buffer with parts of few lines. Two cores of a Xeon copied 8 MiB each in
// 0.74 ms so, in 0.81 with memcpy and in 1.01 when lines were asked for in bursts of sixteen
// (docs/performance.md). Where the lines have just been read, as those of a peer's tensor in the
// arena, asking for them is a little slower in a common cache and much faster between cores that
// share none, which is told from the time it takes (Note [Pairs] in paired_choice.h). It was slower
// on an AMD (Zen 4) that copied into lines which a peer had read: a broadcast of 64 MiB took 7.0 ms
// so and 5.0 without. Copies ask ahead on Intel's only; exchanges, for which it made no difference
// there, everywhere. A reduction through the buffers, which stores its result where it has just
// read an input, asks ahead on others than Intel's: on a Xeon 64 MiB took 8.1 ms without and 8.7
// with.
#pragma once

#include <cstddef>

#include "reduce/kernel_table.h"

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

// Whether stores to lines that have just been read are asked for. See Note [Lines for writing].
bool results_ask_ahead();

// memcpy, faster for large pieces whose lines are not in this core's caches; short ones are left to
// it. Takes empty ones, with any pointers.
void copy_lines(std::byte* to, const std::byte* from, std::size_t bytes);

// Copies what is in `shared` to `to`, and then what is at `from` into `shared`; line by line, so
// that each line of `shared` comes from the core that wrote it once for both. Requires that
// `shared` overlaps none of the others, and that `from` and `to` are apart. Takes empty ones.
void swap_lines(std::byte* to, std::byte* shared, const std::byte* from, std::size_t bytes);

// The loops of one instruction set, over whole lines. For tests; the above use the best.
struct LineKernels {
  void (*copy)(std::byte* to, const std::byte* from, std::size_t bytes);
  void (*copy_ahead)(std::byte* to, const std::byte* from, std::size_t bytes);  // asks for lines
  void (*swap)(std::byte* to, std::byte* shared, const std::byte* from, std::size_t bytes);
};

// Null if this CPU lacks the instruction set.
const LineKernels* line_kernels_for(InstructionSet set);

}  // namespace horon
