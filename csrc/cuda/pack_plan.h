// From the tensors of a batch to the tables of the pack kernel's launches. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "cuda/pack_table.h"

namespace horon {

enum class PackDirection : std::uint8_t {
  kPack,    // from the tensors into the fusion buffer
  kUnpack,  // and back
};

struct PackTensor {
  std::uint64_t address = 0;        // of its first byte
  std::uint64_t buffer_offset = 0;  // in bytes
  std::uint64_t elements = 0;
  DType dtype = DType::kFloat32;         // kOpaque: bytes
  DType buffer_dtype = DType::kFloat32;  // differs from dtype for compression
};

struct PackLaunch {
  PackTableHeader header{};
  std::vector<PackEntry> entries;
};

// One launch, or more where the tensors are many or far apart (Note [Kernel parameters]); none
// where there is nothing to do. Every element is multiplied by the factor; 1 leaves the bits alone.
// Throws UsageError: a factor for a type that has no fractions; a cast that is not between float32
// and a half type; a tensor without memory, or not aligned to its elements.
std::vector<PackLaunch> plan_pack(PackDirection direction, const std::vector<PackTensor>& tensors,
                                  std::uint64_t buffer_address, double factor = 1.0);

struct ByteCopy {
  std::uint64_t source = 0;       // address
  std::uint64_t destination = 0;  // address
  std::uint64_t bytes = 0;
};

// Many copies at once, without a buffer. Throws UsageError.
std::vector<PackLaunch> plan_copies(const std::vector<ByteCopy>& copies);

// Throws UsageError as plan_pack.
PackConversion conversion_between(DType source, DType destination, double factor);

}  // namespace horon
