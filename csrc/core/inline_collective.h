// A collective whose data has all come with the headers.
#pragma once

#include <vector>

#include "core/header.h"

namespace horon {

// Whether every rank's has. Pure; the same on all ranks.
bool are_inline(const std::vector<HeaderView>& headers);

// Fills this rank's outputs; reductions fold in rank order. Requires are_inline(headers), and no
// mismatch.
void run_inline(const Request& request, const std::vector<HeaderView>& headers, int rank);

// By rank; empty unless the op multiplies by them.
PerRank<double> factors_of(const std::vector<HeaderView>& headers);

}  // namespace horon
