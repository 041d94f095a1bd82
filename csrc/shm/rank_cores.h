// Where ranks run, as far as they have told.
#pragma once

#include <sched.h>

#include <cstdint>

#include "shm/segment.h"

namespace horon {

// Tells the others on which core this rank is about to wait; returns the core's number plus one.
inline std::uint32_t tell_core(const Segment& segment, int rank) {
  const auto core_plus_one = static_cast<std::uint32_t>(::sched_getcpu() + 1);
  std::atomic<std::uint32_t>& told = segment.words(rank).core_plus_one;
  if (told.load(std::memory_order_relaxed) != core_plus_one) {
    told.store(core_plus_one, std::memory_order_relaxed);
  }
  return core_plus_one;
}

// What a rank told last; 0 if nothing.
inline std::uint32_t told_core_plus_one(const Segment& segment, int rank) {
  return segment.words(rank).core_plus_one.load(std::memory_order_relaxed);
}

}  // namespace horon
