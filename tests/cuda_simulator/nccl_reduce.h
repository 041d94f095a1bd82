// NCCL's reductions. 16-bit and 8-bit floats are added in float and rounded once, at the end.
#pragma once

#include <cstddef>
#include <vector>

#include "nccl_header.h"
#include "nccl_mesh.h"

namespace horon::simulator {

std::size_t element_bytes(ncclDataType_t dtype);

// Reduces inputs of equal size, in the order of the ranks, so that all ranks get the same bits.
// `op` is one of NCCL's own.
void reduce(const std::vector<Bytes>& inputs, ncclDataType_t dtype, ncclRedOp_t op,
            std::byte* result);

// Multiplies each element by a scalar of the same type.
void multiply(Bytes& data, ncclDataType_t dtype, const std::byte* scalar);

}  // namespace horon::simulator
