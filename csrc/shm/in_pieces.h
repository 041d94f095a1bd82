// System calls over large ranges that signals interrupt.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "core/function_ref.h"
#include "core/round_up.h"

namespace horon {

// Calls `act(offset, bytes)`, which returns 0 or an errno and undoes its part when it is
// interrupted (EINTR), until all of the range is done: in pieces that get smaller until one is done
// between two signals of a timer. Returns 0, or the first other errno, with `*done` the bytes that
// are done.
inline int in_pieces(std::uint64_t begin, std::uint64_t bytes,
                     FunctionRef<int(std::uint64_t, std::uint64_t)> act, std::uint64_t* done) {
  constexpr std::uint64_t kLeastPiece = 4096;
  std::uint64_t piece = bytes;
  *done = 0;
  while (*done < bytes) {
    const std::uint64_t now = std::min(piece, bytes - *done);
    const int error = act(begin + *done, now);
    if (error == 0) {
      *done += now;
    } else if (error != EINTR) {
      return error;
    } else {
      piece = std::max(kLeastPiece, round_up(now / 2, kLeastPiece));
    }
  }
  return 0;
}

}  // namespace horon
