#include "live_groups.h"

#include <utility>

#include "core/deadline.h"
#include "core/error.h"
#include "process_exit.h"

namespace horon::torch_backend {
namespace {

constexpr std::chrono::seconds kAsksOthersAfter{1};

}  // namespace

LiveGroups& LiveGroups::instance() {
  static LiveGroups groups;
  return groups;
}

void LiveGroups::add(const std::shared_ptr<Group>& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const std::weak_ptr<Group>& known) { return known.expired(); });
  groups_.push_back(group);
}

std::optional<std::string> LiveGroups::find_ended(const std::vector<int>& global_ranks,
                                                  bool elsewhere) {
  std::vector<std::shared_ptr<Group>> groups;
  {
    const std::lock_guard lock(mutex_);
    for (const std::weak_ptr<Group>& known : groups_) {
      if (auto group = known.lock()) {
        groups.push_back(std::move(group));
      }
    }
  }
  for (const auto& group : groups) {
    if (auto ended = group->find_ended(global_ranks)) {
      return ended;
    }
  }
  std::vector<int> left = elsewhere ? global_ranks : std::vector<int>();
  for (const auto& group : groups) {
    if (auto ended = left.empty() ? std::nullopt : group->find_ended_elsewhere(&left)) {
      return ended;
    }
  }
  return std::nullopt;
}

void LiveGroups::check_alive(const std::vector<int>& global_ranks, const std::string& what,
                             bool elsewhere) {
  if (const auto ended = find_ended(global_ranks, elsewhere)) {
    throw PeerLostError(concat(*ended, " died before ", what));
  }
}

std::function<void()> LiveGroups::checker(const std::vector<int>& global_ranks,
                                          const std::string& what) {
  return [global_ranks, what, asks_from = Clock::now() + kAsksOthersAfter] {
    instance().check_alive(global_ranks, what, Clock::now() >= asks_from);
  };
}

void LiveGroups::shutdown_all(std::chrono::milliseconds drain) {
  mark_process_exiting();
  std::vector<std::weak_ptr<Group>> groups;
  {
    const std::lock_guard lock(mutex_);
    groups.swap(groups_);
  }
  const Deadline deadline = Deadline::after(drain);
  for (const std::weak_ptr<Group>& known : groups) {
    if (const auto group = known.lock()) {
      group->shutdown(deadline, Lane::Callers::kLeave);
    }
  }
  stop_watching_devices();
  await_calls_out();
}

}  // namespace horon::torch_backend
