// A reduction over a carrier of bytes: every rank reduces its slice of what all bring, and hands it
// out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/function_ref.h"
#include "core/scratch.h"
#include "core/wait_context.h"
#include "cross/byte_transport.h"

namespace horon {

struct SlicedReduction {
  std::uint64_t count = 0;
  std::size_t brought_bytes = 1;  // of an element
  std::size_t result_bytes = 1;   // of an element of the result
  int root = -1;                  // who gets the result; negative: everybody
  // fold(result, sources, count): `sources` in rank order, one for each. `result` may be one of
  // them if elements and results have the same size.
  FunctionRef<void(std::byte*, const void* const*, std::uint64_t)> fold;
};

// How many bytes of each pair of ranks go in one piece: large messages travel best, but what all
// others send is held at once.
std::uint64_t piece_bytes_per_pair(std::size_t n_ranks);

// Gives every other rank its part of what this one brings, and gets as many bytes as the own part
// has from each. The parts of all, in rank order, to be folded: the own one where it lies, the
// others at `received`, which has room for all but one.
std::vector<const void*> exchange_parts(ByteTransport& bytes, int rank, const SentSpans& parts,
                                        std::byte* received, const WaitContext& context);

// `output` may be null where the result does not go to. It may be `input` if elements and results
// have the same size. Blocks; throws what `bytes` throws.
void reduce_in_slices(ByteTransport& bytes, int rank, int n_ranks, const SlicedReduction& reduction,
                      const std::byte* input, std::byte* output, Scratch& scratch,
                      const WaitContext& context);

}  // namespace horon
