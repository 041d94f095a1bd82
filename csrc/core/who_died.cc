#include "core/who_died.h"

#include <chrono>
#include <thread>

#include "core/deadline.h"
#include "core/error.h"

namespace horon {
namespace {

constexpr std::chrono::seconds kDeathIsSeenWithin{2};
// Nothing wakes us: who can be seen to have died differs by channel.
constexpr std::chrono::milliseconds kBetweenLooksForTheDead{10};

}  // namespace

std::string with_the_dead(const std::string& reason, FunctionRef<std::string()> find_dead) {
  const Deadline patience = Deadline::after(kDeathIsSeenWithin);
  std::string dead = find_dead();
  while (dead.empty() && !patience.has_passed()) {
    std::this_thread::sleep_for(kBetweenLooksForTheDead);
    dead = find_dead();
  }
  return dead.empty() ? reason : concat(reason, " (", dead, ")");
}

}  // namespace horon
