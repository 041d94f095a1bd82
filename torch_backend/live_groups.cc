#include "live_groups.h"

#include "core/error.h"
#include "process_exit.h"

namespace horon::torch_backend {

LiveGroups& LiveGroups::instance() {
  static LiveGroups groups;
  return groups;
}

void LiveGroups::add(const std::shared_ptr<Group>& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const std::weak_ptr<Group>& known) { return known.expired(); });
  groups_.push_back(group);
}

std::optional<std::string> LiveGroups::find_ended(const std::vector<int>& global_ranks) {
  std::vector<std::weak_ptr<Group>> groups;
  {
    const std::lock_guard lock(mutex_);
    groups = groups_;
  }
  for (const std::weak_ptr<Group>& known : groups) {
    const auto group = known.lock();
    if (auto ended = group ? group->find_ended(global_ranks) : std::nullopt) {
      return ended;
    }
  }
  return std::nullopt;
}

void LiveGroups::check_alive(const std::vector<int>& global_ranks, const std::string& what) {
  if (const auto ended = find_ended(global_ranks)) {
    throw PeerLostError(concat(*ended, " died before ", what));
  }
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
