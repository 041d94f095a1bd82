// What a report says of a rank that shares memory.
#pragma once

#include "shm/liveness.h"
#include "shm/peers.h"
#include "shm/segment.h"
#include "watch/long_wait.h"

namespace horon {

inline LateRank late_rank(const Segment& segment, const Peers& peers, int rank) {
  return {peers.describe(rank), segment.words(rank).watch_post.load(std::memory_order_relaxed),
          why_it_rests(peers.peers[static_cast<std::size_t>(rank)].liveness_fd.get())};
}

}  // namespace horon
