// The loops over HalfVector: every number of sources in one pass, sums in registers.
// Part of kernels.inl; see Note [One source, several instruction sets].
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/half_vectors.inl"
#include "reduce/passes.inl"

namespace horon {
namespace {

enum class Scale : bool { kNone, kFactors };
enum class Divide : bool { kNo, kByCount };

// Tail is the Passes of the same operation, for the last elements.
template <class Vectors, class Fold, Scale kScale, Divide kDivide, class Tail>
struct HalfPasses {
  static HalfVector term(const void* source, size_t at, FloatVector factor) {
    HalfVector v = Vectors::decode(static_cast<const char*>(source) + at * sizeof(uint16_t));
    if (kScale == Scale::kFactors) v = {v.first * factor, v.second * factor};
    return v;
  }

  static FloatVector factor_of(const double* factors, int r) {
    return splat_float(kScale == Scale::kFactors ? static_cast<float>(factors[r]) : 1.0f);
  }

  static HalfVector fold(const HalfVector& a, const HalfVector& b) {
    return {Fold::fold(a.first, b.first), Fold::fold(a.second, b.second)};
  }

  template <class Targets>
  static void finish(Targets to, size_t at, HalfVector acc, FloatVector n_sources) {
    if (kDivide == Divide::kByCount) acc = {acc.first / n_sources, acc.second / n_sources};
    to.each(
        [=](void* dst) { Vectors::encode(static_cast<char*>(dst) + at * sizeof(uint16_t), acc); });
  }

  template <class Targets>
  static size_t two_sources(Targets to, const void* const* sources, size_t count,
                            const double* factors) {
    const void *s0 = sources[0], *s1 = sources[1];
    const FloatVector f0 = factor_of(factors, 0), f1 = factor_of(factors, 1),
                      two = splat_float(2.0f);
    size_t at = 0;
    for (; at + kHalfVectorCount <= count; at += kHalfVectorCount) {
      finish(to, at, fold(term(s0, at, f0), term(s1, at, f1)), two);
    }
    return at;
  }

  template <class Targets>
  static size_t any_number(Targets to, const void* const* sources, int n, size_t count,
                           const double* factors) {
    const FloatVector f0 = factor_of(factors, 0), n_sources = splat_float(static_cast<float>(n));
    size_t at = 0;
    for (; at + kHalfVectorCount <= count; at += kHalfVectorCount) {
      HalfVector acc = term(sources[0], at, f0);
      for (int r = 1; r < n; ++r) acc = fold(acc, term(sources[r], at, factor_of(factors, r)));
      finish(to, at, acc, n_sources);
    }
    return at;
  }

  static void kernel(void* dst, void* also, const void* const* sources, int n, size_t count,
                     const double* factors) {
    with_targets(dst, also, [=](auto to) {
      const size_t done = n == 2 ? two_sources(to, sources, count, factors)
                                 : any_number(to, sources, n, count, factors);
      if (done < count) Tail::range(to, sources, n, done, count, factors);
    });
  }
};

}  // namespace
}  // namespace horon
