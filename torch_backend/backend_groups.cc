// Groups made out of a group: split and merge.
#include <algorithm>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend.h"
#include "core/error.h"

namespace horon::torch_backend {

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
  std::vector<uint64_t> global_ranks;
  for (const int rank : ranks) {
    const auto& parents = options_->global_ranks_in_group;
    global_ranks.push_back(parents.empty() ? static_cast<uint64_t>(rank)
                                           : parents[static_cast<std::size_t>(rank)]);
  }
  options->global_ranks_in_group = std::move(global_ranks);
  const auto keys =
      c10::make_intrusive<c10d::PrefixStore>(next_split_key(options->group_name, ranks), store);
  return c10::make_intrusive<HoronBackend>(keys, static_cast<int>(own - ranks.begin()),
                                           static_cast<int>(ranks.size()), options, make_gloo_);
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

}  // namespace horon::torch_backend
