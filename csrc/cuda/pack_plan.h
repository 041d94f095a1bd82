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

struct PackOptions {
  double factor = 1.0;  // multiplies every element; 1 leaves the bits alone
  // Of the device. Bounds how finely a small batch is divided.
  std::uint32_t n_multiprocessors = 108;
};

struct PackLaunch {
  PackTableHeader header{};
  std::vector<PackPart> parts;

  std::uint32_t n_blocks() const {
    return static_cast<std::uint32_t>(
        (std::uint64_t{header.n_grains} + header.grains_per_block - 1) / header.grains_per_block);
  }
};

// The fewest launches that do everything; none where there is nothing to do. See Note [Blocks of
// bytes]. The result does not depend on n_multiprocessors, only how it is divided does.
// Throws UsageError: a factor for a type that has no fractions; a cast that is not between float32
// and a half type; a tensor without memory, or not aligned to its elements.
std::vector<PackLaunch> plan_pack(PackDirection direction, const std::vector<PackTensor>& tensors,
                                  std::uint64_t buffer_address, const PackOptions& options);

struct ByteCopy {
  std::uint64_t source = 0;       // address
  std::uint64_t destination = 0;  // address
  std::uint64_t bytes = 0;
};

// Many copies at once, without a buffer; options.factor is not looked at. Throws UsageError.
std::vector<PackLaunch> plan_copies(const std::vector<ByteCopy>& copies,
                                    const PackOptions& options);

// Throws UsageError as plan_pack.
PackConversion conversion_between(DType source, DType destination, double factor);

}  // namespace horon
