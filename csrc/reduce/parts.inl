// What a kernel is made of: how an element of source r enters the fold (term), the fold, and how
// the result leaves (finish). Part of kernels.inl; see Note [One source, several instruction sets].
#pragma once

#include <cstdint>

#include "reduce/half_codec.inl"

namespace horon {
namespace {

template <class T>
struct FloatCodec {
  using Element = T;
  using Acc = T;
  static T decode(T value) { return value; }
  static T encode(T value) { return canonical(value); }
};

// ---- Folds. V is a scalar or, in the float16 kernels, a vector of floats.
// -------------------------------------------

struct Sum {
  template <class V>
  static V fold(V a, V b) {
    return static_cast<V>(a + b);
  }
};

struct FloatProduct {
  template <class V>
  static V fold(V a, V b) {
    return a * b;
  }
};

struct IntegerProduct {
  // The 1u keeps uint16_t from being promoted to int, where the product could overflow.
  template <class V>
  static V fold(V a, V b) {
    return static_cast<V>(1u * a * b);
  }
};

// NaN in either argument gives NaN; on a tie the earlier rank wins, which settles -0 against +0.
struct FloatMin {
  template <class V>
  static V fold(V a, V b) {
    return ((a <= b) | (a != a)) ? a : b;
  }
};

struct FloatMax {
  template <class V>
  static V fold(V a, V b) {
    return ((a >= b) | (a != a)) ? a : b;
  }
};

struct IntegerMin {
  template <class V>
  static V fold(V a, V b) {
    return a < b ? a : b;
  }
};

struct IntegerMax {
  template <class V>
  static V fold(V a, V b) {
    return a > b ? a : b;
  }
};

struct BitAnd {
  template <class V>
  static V fold(V a, V b) {
    return static_cast<V>(a & b);
  }
};

struct BitOr {
  template <class V>
  static V fold(V a, V b) {
    return static_cast<V>(a | b);
  }
};

struct BitXor {
  template <class V>
  static V fold(V a, V b) {
    return static_cast<V>(a ^ b);
  }
};

// ---- Terms: Element -> Acc, constructed with the rank's factor (1 where there is none).
// -----------------------------

template <class Codec>
struct Decoded {
  using Element = typename Codec::Element;
  using Acc = typename Codec::Acc;
  explicit Decoded(double) {}
  Acc operator()(Element element) const { return Codec::decode(element); }
};

template <class Codec>
struct ScaledFloat {
  using Element = typename Codec::Element;
  using Acc = typename Codec::Acc;
  Acc factor;
  explicit ScaledFloat(double f) : factor(static_cast<Acc>(f)) {}
  Acc operator()(Element element) const { return Codec::decode(element) * factor; }
};

// Converts between integers; widening a signed type to an unsigned one keeps the value modulo
// 2^bits.
template <class From, class To>
struct IntegerTerm {
  using Element = From;
  using Acc = To;
  explicit IntegerTerm(double) {}
  Acc operator()(Element element) const { return static_cast<Acc>(element); }
};

template <class T, class Unsigned>
struct ScaledInteger {
  using Element = T;
  using Acc = Unsigned;
  static constexpr bool kSigned = T(-1) < T(0);
  static constexpr T kLowest = kSigned ? T(T(1) << (8 * sizeof(T) - 1)) : T(0);
  static constexpr T kHighest = T(~kLowest);
  static constexpr double kEnd =
      2.0 * double(uint64_t(1) << (8 * sizeof(T) - (kSigned ? 2 : 1)));  // kHighest + 1.
  double factor;
  explicit ScaledInteger(double f) : factor(f) {}
  Acc operator()(Element element) const {
    const double product = static_cast<double>(element) * factor;
    if (product != product) return 0;
    if (product >= kEnd) return static_cast<Acc>(kHighest);
    if (product <= static_cast<double>(kLowest)) return static_cast<Acc>(kLowest);
    return static_cast<Acc>(static_cast<T>(product));
  }
};

struct Truth {
  using Element = uint8_t;
  using Acc = uint8_t;
  explicit Truth(double) {}
  Acc operator()(Element element) const { return element != 0; }
};

// ---- Finishes: Acc -> Element, constructed with the number of sources.
// ----------------------------------------------

template <class Codec>
struct Rounded {
  explicit Rounded(int) {}
  typename Codec::Element operator()(typename Codec::Acc acc) const { return Codec::encode(acc); }
};

template <class Codec>
struct FloatMean {
  using Acc = typename Codec::Acc;
  Acc n_sources;
  explicit FloatMean(int n) : n_sources(static_cast<Acc>(n)) {}
  typename Codec::Element operator()(Acc acc) const { return Codec::encode(acc / n_sources); }
};

template <class T>
struct Stored {
  explicit Stored(int) {}
  template <class Acc>
  T operator()(Acc acc) const {
    return static_cast<T>(acc);
  }
};

// Wide is int64_t or uint64_t, as T is signed or not.
template <class T, class Wide>
struct IntegerMean {
  Wide n_sources;
  explicit IntegerMean(int n) : n_sources(n) {}
  T operator()(uint64_t acc) const { return static_cast<T>(static_cast<Wide>(acc) / n_sources); }
};

}  // namespace
}  // namespace horon
