// How the elements of several ranks are folded into one.
#pragma once

#include <cstdint>

namespace horon {

// The values are part of the arrival header that ranks exchange: append only.
enum class ReduceOp : uint8_t {
  kSum,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
  kPremulSum,  // Each source is multiplied by its own factor, then summed.
};

inline constexpr int kReduceOpCount = 9;

// torch's name: "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM";
// "UNKNOWN" outside the enum.
const char* name(ReduceOp op);

}  // namespace horon
