#include "shm/swap_lines.h"

#include <cstdint>
#include <cstring>

#include "shm/copy_ahead.h"

namespace horon {
namespace {

using Swap = void (*)(std::byte*, std::byte*, const std::byte*, std::size_t);

using Vector16 = std::uint64_t __attribute__((vector_size(16)));
using Vector32 = std::uint64_t __attribute__((vector_size(32)));
using Vector64 = std::uint64_t __attribute__((vector_size(64)));

template <typename Vector>
[[gnu::always_inline]] inline void swap_by(std::byte* to, std::byte* shared, const std::byte* from,
                                           std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  std::size_t done = 0;
  for (; done + kLine <= bytes; done += kLine) {
    prefetch_for_write(shared + done + kAheadBytes, kLine);
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
  if (done < bytes) {
    std::memcpy(to + done, shared + done, bytes - done);
    std::memcpy(shared + done, from + done, bytes - done);
  }
}

void swap_baseline(std::byte* to, std::byte* shared, const std::byte* from, std::size_t bytes) {
  swap_by<Vector16>(to, shared, from, bytes);  // SSE2, NEON
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void swap_avx2(std::byte* to, std::byte* shared, const std::byte* from,
                                       std::size_t bytes) {
  swap_by<Vector32>(to, shared, from, bytes);
}

[[gnu::target("avx512f")]] void swap_avx512(std::byte* to, std::byte* shared, const std::byte* from,
                                            std::size_t bytes) {
  swap_by<Vector64>(to, shared, from, bytes);
}

Swap best_swap() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) {
    return &swap_avx512;
  }
  return __builtin_cpu_supports("avx2") ? &swap_avx2 : &swap_baseline;
}
#else
Swap best_swap() { return &swap_baseline; }
#endif

}  // namespace

void swap_lines(std::byte* to, std::byte* shared, const std::byte* from, std::size_t bytes) {
  static const Swap swap = best_swap();
  swap(to, shared, from, bytes);
}

}  // namespace horon
