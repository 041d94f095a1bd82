#include "core/tensor_pieces.h"

namespace horon {

void TensorPieces::add(const std::byte* input, std::byte* output, std::uint64_t bytes) {
  if (bytes > 0) {
    pieces_.push_back({input, output, bytes_, bytes});
    bytes_ += bytes;
  }
}

void TensorPieces::clear() {
  pieces_.clear();
  bytes_ = 0;
}

bool TensorPieces::are_apart() const {
  struct Range {
    const std::byte* begin;
    const std::byte* end;
    bool is_written;
  };
  std::vector<Range> ranges;
  ranges.reserve(2 * pieces_.size());
  for (const Piece& piece : pieces_) {
    ranges.push_back({piece.output, piece.output + piece.bytes, true});
    if (piece.input != piece.output) {
      ranges.push_back({piece.input, piece.input + piece.bytes, false});
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  const std::byte* used_to = nullptr;
  const std::byte* written_to = nullptr;
  for (const Range& range : ranges) {
    if (range.begin < (range.is_written ? used_to : written_to)) {
      return false;
    }
    used_to = std::max(used_to, range.end);
    written_to = range.is_written ? std::max(written_to, range.end) : written_to;
  }
  return true;
}

}  // namespace horon
