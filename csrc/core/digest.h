// A number that differs, all but surely, where lists of numbers differ.
#pragma once

#include <cstdint>

namespace horon {

inline constexpr std::uint64_t kEmptyDigest = 14695981039346656037ULL;

// Pure. The digest of a list that has got another value (FNV-1a, by words).
constexpr std::uint64_t fold_in(std::uint64_t digest, std::uint64_t value) {
  return (digest ^ value) * 1099511628211ULL;
}

}  // namespace horon
