// A reduction over a carrier of bytes: every rank reduces its slice of what all bring, and hands it
// out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/function_ref.h"
#include "core/wait_context.h"
#include "cross/byte_transport.h"

namespace horon {

struct SlicedReduction {
  std::uint64_t count = 0;
  std::size_t brought_bytes = 1;  // of an element
  std::size_t result_bytes = 1;   // of an element of the result
  int root = -1;                  // who gets the result; negative: everybody
  // fold(result, sources, count): `sources` in rank order, one for each.
  FunctionRef<void(std::byte*, const void* const*, std::uint64_t)> fold;
};

// `output` may be null where the result does not go to. It may be `input` if elements and results
// have the same size. Blocks; throws what `bytes` throws.
void reduce_in_slices(ByteTransport& bytes, int rank, int n_ranks, const SlicedReduction& reduction,
                      const std::byte* input, std::byte* output, const WaitContext& context);

}  // namespace horon
