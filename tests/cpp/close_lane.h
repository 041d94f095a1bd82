// The end of a lane of whose last operations nothing is expected.
#pragma once

#include "core/lane.h"
#include "rank_threads.h"

namespace horon::testing {

inline void close_now(Lane& lane) {
  lane.close(patient(), [] {});
}

}  // namespace horon::testing
