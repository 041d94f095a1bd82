#include "shm/line_copies.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace horon {
namespace {

constexpr std::size_t kLine = 64;
// Shorter copies are left to memcpy.
constexpr std::size_t kLeastCopiedBytes = std::size_t{4} * 1024;

using Vector16 = std::uint64_t __attribute__((vector_size(16)));
using Vector32 = std::uint64_t __attribute__((vector_size(32)));
using Vector64 = std::uint64_t __attribute__((vector_size(64)));

// Whole lines.
template <typename Vector, bool kAsksAhead>
[[gnu::always_inline]] inline void copy_by(std::byte* to, const std::byte* from,
                                           std::size_t bytes) {
  for (std::size_t done = 0; done < bytes; done += kLine) {
    if constexpr (kAsksAhead) {
      prefetch_for_write(to + done + kAheadBytes, kLine);
    }
    for (std::size_t at = done; at < done + kLine; at += sizeof(Vector)) {
      Vector part;
      std::memcpy(&part, from + at, sizeof(Vector));
      std::memcpy(to + at, &part, sizeof(Vector));
    }
  }
}

template <typename Vector>
[[gnu::always_inline]] inline void swap_by(std::byte* to, std::byte* shared, const std::byte* from,
                                           std::size_t bytes) {
  for (std::size_t done = 0; done < bytes; done += kLine) {
    prefetch_for_write(to + done + kAheadBytes, kLine);
    for (std::size_t at = done; at < done + kLine; at += sizeof(Vector)) {
      Vector out;
      Vector in;
      std::memcpy(&out, shared + at, sizeof(Vector));
      std::memcpy(&in, from + at, sizeof(Vector));
      std::memcpy(to + at, &out, sizeof(Vector));
      std::memcpy(shared + at, &in, sizeof(Vector));
    }
  }
}

template <bool kAsksAhead>
void copy_baseline(std::byte* to, const std::byte* from, std::size_t bytes) {
  copy_by<Vector16, kAsksAhead>(to, from, bytes);  // SSE2, NEON
}
void swap_baseline(std::byte* to, std::byte* shared, const std::byte* from, std::size_t bytes) {
  swap_by<Vector16>(to, shared, from, bytes);
}

#if defined(__x86_64__)
template <bool kAsksAhead>
[[gnu::target("avx2")]] void copy_avx2(std::byte* to, const std::byte* from, std::size_t bytes) {
  copy_by<Vector32, kAsksAhead>(to, from, bytes);
}
[[gnu::target("avx2")]] void swap_avx2(std::byte* to, std::byte* shared, const std::byte* from,
                                       std::size_t bytes) {
  swap_by<Vector32>(to, shared, from, bytes);
}

template <bool kAsksAhead>
[[gnu::target("avx512f")]] void copy_avx512(std::byte* to, const std::byte* from,
                                            std::size_t bytes) {
  copy_by<Vector64, kAsksAhead>(to, from, bytes);
}
[[gnu::target("avx512f")]] void swap_avx512(std::byte* to, std::byte* shared, const std::byte* from,
                                            std::size_t bytes) {
  swap_by<Vector64>(to, shared, from, bytes);
}

constexpr LineKernels kAvx2{&copy_avx2<false>, &copy_avx2<true>, &swap_avx2};
constexpr LineKernels kAvx512{&copy_avx512<false>, &copy_avx512<true>, &swap_avx512};
#endif
constexpr LineKernels kBaseline{&copy_baseline<false>, &copy_baseline<true>, &swap_baseline};

bool is_intel() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

// See Note [Lines for writing].
bool copies_ask_ahead() {
#if defined(__x86_64__)
  return is_intel();
#else
  return true;
#endif
}

// The loops for this CPU.
struct Loops {
  explicit Loops(const LineKernels& kernels)
      : copy(copies_ask_ahead() ? kernels.copy_ahead : kernels.copy), swap(kernels.swap) {}

  decltype(LineKernels::copy) copy;
  decltype(LineKernels::swap) swap;
};

const Loops& loops() {
  static const Loops best = [] {
    for (const InstructionSet set : {InstructionSet::kAvx512, InstructionSet::kAvx2}) {
      if (const LineKernels* kernels = line_kernels_for(set)) {
        return Loops(*kernels);
      }
    }
    return Loops(kBaseline);
  }();
  return best;
}

}  // namespace

bool results_ask_ahead() {
  static const bool answer = !is_intel();
  return answer;
}

const LineKernels* line_kernels_for(InstructionSet set) {
  switch (kernels_for(set) == nullptr ? InstructionSet::kBaseline : set) {
#if defined(__x86_64__)
    case InstructionSet::kAvx512:
      return &kAvx512;
    case InstructionSet::kAvx2:
      return &kAvx2;
#endif
    default:
      return set == InstructionSet::kBaseline ? &kBaseline : nullptr;
  }
}

void copy_lines(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::size_t done = 0;
  if (bytes >= kLeastCopiedBytes) {
    const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);  // stores of whole lines from here on
    done = head + (bytes - head) / kLine * kLine;
    loops().copy(to + head, from + head, done - head);
  }
  if (done < bytes) {
    std::memcpy(to + done, from + done, bytes - done);
  }
}

void swap_lines(std::byte* to, std::byte* shared, const std::byte* from, std::size_t bytes) {
  const std::size_t lines = bytes / kLine * kLine;
  loops().swap(to, shared, from, lines);
  if (lines < bytes) {
    std::memcpy(to + lines, shared + lines, bytes - lines);
    std::memcpy(shared + lines, from + lines, bytes - lines);
  }
}

}  // namespace horon
