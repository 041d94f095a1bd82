// One tensor that lies in several pieces of memory: how a reduction takes many small tensors at
// once without packing them first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace horon {

// Ownership: points at memory that somebody else keeps. Thread safety: none.
class TensorPieces {
 public:
  // Appends a piece of whole elements; `output` may be `input`.
  void add(const std::byte* input, std::byte* output, std::uint64_t bytes);
  void clear();

  std::uint64_t bytes() const { return bytes_; }

  // Whether no output overlaps another piece, so that results may be stored before all inputs have
  // been read.
  bool are_apart() const;

  // Calls visit(input, output, bytes) for each part of [begin, begin + bytes), in order.
  // Requires begin + bytes <= this->bytes().
  template <typename Visit>
  void visit(std::uint64_t begin, std::uint64_t bytes, const Visit& visit) const {
    const std::uint64_t end = begin + bytes;
    auto piece = std::upper_bound(
        pieces_.begin(), pieces_.end(), begin,
        [](std::uint64_t byte, const Piece& candidate) { return byte < candidate.end(); });
    for (; begin < end; ++piece) {
      const std::uint64_t offset = begin - piece->begin;
      const std::uint64_t part = std::min(piece->end(), end) - begin;
      visit(piece->input + offset, piece->output + offset, part);
      begin += part;
    }
  }

 private:
  struct Piece {
    const std::byte* input;
    std::byte* output;
    std::uint64_t begin;  // in the tensor
    std::uint64_t bytes;
    std::uint64_t end() const { return begin + bytes; }
  };

  std::vector<Piece> pieces_;  // none is empty
  std::uint64_t bytes_ = 0;
};

}  // namespace horon
