// Groups made out of a group: split and merge.
#include <algorithm>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend.h"
#include "core/error.h"
#include "core/log.h"
#include "core/rank_list.h"

namespace horon::torch_backend {
namespace {

constexpr int kShrinkAbort = 1;  // torch.distributed.SHRINK_ABORT

// All have just been together.
constexpr std::chrono::milliseconds kTwinPatience{60'000};

constexpr const char* kGivenUp = "given up";

// So that nobody waits for this rank: on another host, nobody sees why it does not come.
void leave_word(c10d::Store& meeting) {
  try {
    meeting.set(kGivenUp, std::string("1"));
  } catch (const std::exception& error) {
    log_warning(concat("shrink: could not tell the others that this rank gave up: ", error.what()));
  }
}

bool is_given_up(c10d::Store& meeting) {
  try {
    return meeting.check({kGivenUp});
  } catch (const std::exception&) {
    return false;  // what is asked of the store next says so
  }
}

}  // namespace

c10::intrusive_ptr<BackendOptions> HoronBackend::options_for_child(
    const c10::intrusive_ptr<Options>& opts) const {
  auto options = c10::make_intrusive<BackendOptions>(*options_);
  if (opts) {
    options->timeout = opts->timeout;
    options->group_name = opts->group_name;
    options->group_desc = opts->group_desc;
    if (const auto* ours = dynamic_cast<const BackendOptions*>(opts.get())) {
      options->engine = ours->engine;
    }
  }
  return options;
}

std::string HoronBackend::next_split_key(const std::string& name, const std::vector<int>& ranks) {
  std::string key = "horon_split/" + name;
  for (const int rank : ranks) {
    key += concat("/", rank);
  }
  const std::lock_guard lock(splits_mutex_);
  return concat(key, "/", splits_[key]++);
}

std::vector<uint64_t> HoronBackend::global_ranks_of(const std::vector<int>& ranks) const {
  const auto& known = options_->global_ranks_in_group;
  std::vector<uint64_t> global_ranks(ranks.size());
  std::transform(ranks.begin(), ranks.end(), global_ranks.begin(), [&](int rank) {
    return known.empty() ? static_cast<uint64_t>(rank) : known[static_cast<std::size_t>(rank)];
  });
  return global_ranks;
}

c10::intrusive_ptr<c10d::Backend> HoronBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const std::vector<int>& ranks,
                                                      const c10::intrusive_ptr<Options>& opts) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) {
    return nullptr;
  }
  for (const int rank : ranks) {
    check_rank("split", rank);
  }
  auto options = options_for_child(opts);
  options->global_ranks_in_group = global_ranks_of(ranks);
  const auto keys =
      c10::make_intrusive<c10d::PrefixStore>(next_split_key(options->group_name, ranks), store);
  return c10::make_intrusive<HoronBackend>(keys, static_cast<int>(own - ranks.begin()),
                                           static_cast<int>(ranks.size()), options, make_gloo_);
}

c10::intrusive_ptr<HoronBackend> HoronBackend::make_twin() {
  int number = 0;
  {
    const std::lock_guard lock(twins_mutex_);
    number = n_twins_++;
  }
  const auto keys = c10::make_intrusive<c10d::PrefixStore>(concat("horon_twin/", number), store_);
  auto options = c10::make_intrusive<BackendOptions>(*options_);
  options->timeout = group_->timeout();
  Beginning beginning;
  beginning.hooks = hooks_;
  beginning.meeting_timeout = std::min(group_->timeout(), kTwinPatience);
  auto twin = c10::make_intrusive<HoronBackend>(keys, rank_, size_, std::move(options), make_gloo_,
                                                std::move(beginning));
  const std::lock_guard lock(twins_mutex_);
  std::erase_if(twins_, [](const auto& known) { return known.expired(); });
  twins_.push_back(twin->group_);
  return twin;
}

void HoronBackend::visit_twins(FunctionRef<void(Group&)> visit) {
  std::vector<std::weak_ptr<Group>> twins;
  {
    const std::lock_guard lock(twins_mutex_);
    twins = twins_;
  }
  for (const std::weak_ptr<Group>& twin : twins) {
    if (const std::shared_ptr<Group> group = twin.lock()) {
      visit(*group);
    }
  }
}

c10::intrusive_ptr<c10d::Backend> HoronBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const c10::intrusive_ptr<Options>& opts,
                                                      const int& rank, const int& size) {
  auto options = options_for_child(opts);
  options->global_ranks_in_group.clear();  // The members may belong to different worlds.
  options->has_foreign_ranks = true;
  const auto keys = c10::make_intrusive<c10d::PrefixStore>("horon_merge", store);
  return c10::make_intrusive<HoronBackend>(keys, rank, size, options, make_gloo_);
}

c10::intrusive_ptr<c10d::Backend> HoronBackend::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<Options>& opts_override) {
  {
    const std::lock_guard lock(prepared_mutex_);
    if (prepared_ && prepared_without_ == ranks_to_exclude) {
      return std::move(prepared_);
    }
  }
  if ((shrink_flags & kShrinkAbort) != 0) {
    give_up("the group was shrunk");
  }
  return make_shrunk(ranks_to_exclude, opts_override, std::nullopt);
}

void HoronBackend::prepare_shrink(const std::vector<int64_t>& ranks_to_exclude,
                                  std::chrono::milliseconds timeout) {
  auto made = make_shrunk(ranks_to_exclude, nullptr, timeout);
  const std::lock_guard lock(prepared_mutex_);
  prepared_without_ = ranks_to_exclude;
  prepared_.swap(made);  // what was prepared before ends when the lock is let go
}

c10::intrusive_ptr<HoronBackend> HoronBackend::make_shrunk(
    const std::vector<int64_t>& ranks_to_exclude, const c10::intrusive_ptr<Options>& opts,
    std::optional<std::chrono::milliseconds> timeout) {
  group_->check_process("shrink");
  for (const int64_t rank : ranks_to_exclude) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_ && rank != rank_, "horon: shrink: expected ranks ",
                      "of this group of ", size_, " other than this process's, ", rank_, ", got ",
                      rank, ".");
  }
  std::vector<int> left;
  for (int rank = 0; rank < size_; ++rank) {
    if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), rank) ==
        ranks_to_exclude.end()) {
      left.push_back(rank);
    }
  }
  const auto keys = c10::make_intrusive<c10d::PrefixStore>(next_split_key("shrink", left), store_);
  Beginning beginning;
  beginning.meeting_timeout = timeout;
  beginning.look_around = [group = group_, left, keys] {
    std::vector<int> missing;
    const std::vector<int> ended = group->ended_ranks();
    std::copy_if(ended.begin(), ended.end(), std::back_inserter(missing),
                 [&](int rank) { return std::find(left.begin(), left.end(), rank) != left.end(); });
    if (!missing.empty()) {
      throw PeerLostError(concat("shrink: ", name_ranks(missing), " died before the group of the ",
                                 left.size(), " ranks that were left was made"));
    }
    if (is_given_up(*keys)) {
      throw PeerLostError(concat("shrink: another one of the ", left.size(),
                                 " ranks that were left could not meet them"));
    }
  };
  auto options = options_for_child(opts);
  // Without the default group's other ranks, torch numbers those that are left anew.
  const bool is_default = options_->global_ranks_in_group.empty();
  options->global_ranks_in_group = is_default ? std::vector<uint64_t>() : global_ranks_of(left);
  const auto own = std::find(left.begin(), left.end(), rank_);
  try {
    return c10::make_intrusive<HoronBackend>(keys, static_cast<int>(own - left.begin()),
                                             static_cast<int>(left.size()), options, make_gloo_,
                                             std::move(beginning));
  } catch (...) {
    leave_word(*keys);
    throw;
  }
}

}  // namespace horon::torch_backend
