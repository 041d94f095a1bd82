// Takes out of shared lines what a peer has left there, and puts the next thing in, at once.
#pragma once

#include <cstddef>

namespace horon {

// Copies what is in `shared` to `to`, and then what is at `from` into `shared`; line by line, so
// that each line of `shared` comes from the core that wrote it once for both, and a kilobyte ahead
// (see Note [Lines for writing] in copy_ahead.h). With the widest vectors of this CPU: what waits
// for lines are single stores, so that narrow ones fill the store buffer with parts of few lines.
// Requires that `shared` overlaps none of the others, and that `from` and `to` are apart. Takes
// empty ones.
void swap_lines(std::byte* to, std::byte* shared, const std::byte* from, std::size_t bytes);

}  // namespace horon
