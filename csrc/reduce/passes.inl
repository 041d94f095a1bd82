// The loops: a fold over any number of sources, with sums that wait for further sources in the L1
// cache. Part of kernels.inl; see Note [One source, several instruction sets].
#pragma once

#include <cstddef>

// A target may be one of the sources. The iterations are still independent, but a compiler that
// checks at run time whether arrays overlap would send just the in-place case, the common one, to
// its scalar loop.
#if defined(__clang__)
#pragma clang diagnostic ignored \
    "-Wpass-failed"  // Integer division has no vector form; that is no news.
#define HORON_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define HORON_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace horon {
namespace {

// Through memcpy, so that neither alignment nor the type that the caller knows the bytes under
// matters.
template <class T>
inline T load(const void* base, size_t i) {
  T value;
  __builtin_memcpy(&value, static_cast<const char*>(base) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
inline void store(void* base, size_t i, T value) {
  __builtin_memcpy(static_cast<char*>(base) + i * sizeof(T), &value, sizeof(T));
}

// Where results go.
struct OneTarget {
  void* dst;
  template <class Body>
  void each(Body body) const {
    body(dst);
  }
};

struct TwoTargets {
  void* dst;
  void* also;
  template <class Body>
  void each(Body body) const {
    body(dst);
    body(also);
  }
};

// Calls body with the targets that there are.
template <class Body>
inline void with_targets(void* dst, void* also, Body body) {
  if (also == nullptr) {
    body(OneTarget{dst});
  } else {
    body(TwoTargets{dst, also});
  }
}

template <class T, class Targets>
inline void store(Targets targets, size_t i, T value) {
  targets.each([=](void* base) { store<T>(base, i, value); });
}

template <class Body>
inline void for_each_index(size_t count, Body body) {
  HORON_INDEPENDENT_ITERATIONS
  for (size_t i = 0; i < count; ++i) body(i);
}

// What the accumulator of one block takes on the stack: leaves most of the smallest L1 (32 KiB) to
// two sources.
inline constexpr size_t kBlockBytes = 4096;

template <class Term, class Fold, class Finish>
struct Passes {
  using Element = typename Term::Element;
  using Acc = typename Term::Acc;
  static constexpr size_t kBlock = kBlockBytes / sizeof(Acc);

  static Term term(const double* factors, int r) {
    return Term(factors != nullptr ? factors[r] : 1.0);
  }

  // Folds units [begin, end).
  template <class Targets>
  static void range(Targets to, const void* const* sources, int n, size_t begin, size_t end,
                    const double* factors) {
    const Finish finish(n);
    const Term t0 = term(factors, 0);
    if (n == 1) {
      const void* s0 = sources[0];
      for_each_index(end - begin, [=](size_t i) {
        store<Element>(to, begin + i, finish(t0(load<Element>(s0, begin + i))));
      });
    } else if (n == 2) {
      const void *s0 = sources[0], *s1 = sources[1];
      const Term t1 = term(factors, 1);
      for_each_index(end - begin, [=](size_t i) {
        const size_t at = begin + i;
        store<Element>(to, at,
                       finish(Fold::fold(t0(load<Element>(s0, at)), t1(load<Element>(s1, at)))));
      });
    } else {
      for (size_t at = begin; at < end; at += kBlock) {
        block(to, sources, n, at, end - at < kBlock ? end - at : kBlock, factors, finish);
      }
    }
  }

  // Not inlined: GCC 12 would interchange the loops over sources and elements, and then vectorise
  // neither.
  [[gnu::noinline]] static void add_one(Acc* sums, const void* source, size_t begin, size_t count,
                                        Term t) {
    for_each_index(count, [=](size_t i) {
      sums[i] = Fold::fold(sums[i], t(load<Element>(source, begin + i)));
    });
  }

  // n >= 3. One source at a time: GCC 12 does not vectorise two FloatMin in a row. The
  // targets are written last, as they may be any of the sources.
  template <class Targets>
  static void block(Targets to, const void* const* sources, int n, size_t begin, size_t count,
                    const double* factors, Finish finish) {
    alignas(64) Acc acc[kBlock];
    Acc* const sums = acc;
    const Term t0 = term(factors, 0), t1 = term(factors, 1), last_term = term(factors, n - 1);
    const void *s0 = sources[0], *s1 = sources[1], *last = sources[n - 1];
    for_each_index(count, [=](size_t i) {
      sums[i] = Fold::fold(t0(load<Element>(s0, begin + i)), t1(load<Element>(s1, begin + i)));
    });
    for (int r = 2; r < n - 1; ++r) add_one(sums, sources[r], begin, count, term(factors, r));
    for_each_index(count, [=](size_t i) {
      store<Element>(to, begin + i,
                     finish(Fold::fold(sums[i], last_term(load<Element>(last, begin + i)))));
    });
  }

  static void kernel(void* dst, void* also, const void* const* sources, int n, size_t count,
                     const double* factors) {
    with_targets(dst, also, [=](auto to) { range(to, sources, n, 0, count, factors); });
  }
};

}  // namespace
}  // namespace horon
