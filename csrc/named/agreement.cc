#include "named/agreement.h"

#include <algorithm>
#include <functional>

#include "core/error.h"
#include "core/rank_list.h"
#include "named/mismatch.h"

namespace horon {
namespace {

// Names that were agreed once are remembered until as many others have come, twice.
constexpr std::size_t kSeenNames = std::size_t{1} << 16;
// A name whose shape changes all the time gets no more numbers than this.
constexpr std::size_t kMaxIdsPerName = 8;

}  // namespace

struct Agreement::ProcessSet {
  std::vector<int> ranks;     // sorted
  std::vector<int> index_of;  // by rank; -1 for others
  int n_departed = 0;
  bool is_removed = false;
  bool is_delivered = false;  // the decision that removed it
};

struct Agreement::Pending {
  const ProcessSet* set = nullptr;
  std::string key;
  std::vector<RequestId> ids;
  // Below: of the operation that is in flight, if there is one.
  bool is_active = false;
  PendingList::iterator place;  // in active_
  RequestPtr request;           // the first rank's
  int first_rank = 0;
  std::vector<bool> has_announced;  // by index in the set
  int n_announced = 0;
  std::optional<std::string> mismatch;
  Clock::time_point since;
};

Agreement::Agreement(int n_ranks, bool join_everything)
    : n_ranks_(n_ranks),
      join_everything_(join_everything),
      joined_(static_cast<std::size_t>(n_ranks)),
      departed_(static_cast<std::size_t>(n_ranks)) {
  ProcessSet world;
  for (int rank = 0; rank < n_ranks; ++rank) {
    world.ranks.push_back(rank);
    world.index_of.push_back(rank);
  }
  sets_[0] = std::move(world);
}

Agreement::~Agreement() = default;

std::vector<Decision> Agreement::take() {
  if (!decisions_.empty()) {
    std::erase_if(sets_, [](const auto& entry) { return entry.second.is_delivered; });
    for (auto& [id, set] : sets_) {
      set.is_delivered = set.is_removed;
    }
  }
  return std::exchange(decisions_, {});
}

const std::vector<int>* Agreement::members(int process_set) const {
  const auto found = sets_.find(process_set);
  return found == sets_.end() ? nullptr : &found->second.ranks;
}

bool Agreement::is_member(int process_set, int rank) const {
  const auto found = sets_.find(process_set);
  return found != sets_.end() && found->second.index_of[static_cast<std::size_t>(rank)] >= 0;
}

Agreement::Pending& Agreement::pending_of(const RequestPtr& request) {
  std::string key = key_of(*request);
  auto& slot = pending_[key];
  if (!slot) {
    slot = std::make_unique<Pending>();
    slot->key = std::move(key);
    slot->set = &sets_.at(request->process_set);
  }
  return *slot;
}

void Agreement::check(int rank, const NamedRequest& request) const {
  HORON_CHECK(!request.tensors.empty() && request.kind != NamedKind::kJoin, "rank ", rank,
              " announced a request that makes no sense");
  if (request.kind == NamedKind::kBroadcast) {
    HORON_CHECK(request.root >= 0 && request.root < n_ranks_ &&
                    is_member(request.process_set, request.root),
                "rank ", rank, " announced '", request.name(), "' with root ", request.root,
                ", which is not in its process set");
  }
  int before = -1;
  for (const std::int32_t member : request.ranks) {
    HORON_CHECK(member > before && member < n_ranks_, "rank ", rank,
                " announced a process set whose ranks are not sorted, unique and existing");
    before = member;
  }
}

void Agreement::announce(int rank, const RequestPtr& request, Clock::time_point now) {
  const auto set = sets_.find(request->process_set);
  if (set == sets_.end() || set->second.is_removed) {
    fail_one(rank, *request, concat("process set ", request->process_set, " does not exist."));
    return;
  }
  check(rank, *request);
  add(pending_of(request), rank, request, now);
}

void Agreement::announce_known(int rank, RequestId id, Clock::time_point now) {
  HORON_CHECK(id < known_.size(), "rank ", rank, " announced unknown request number ", id);
  const Known& known = known_[id];
  if (known.pending == nullptr) {
    fail_one(rank, *known.request,
             concat("process set ", known.request->process_set, " does not exist."));
    return;
  }
  add(*known.pending, rank, known.request, now);
}

void Agreement::add(Pending& pending, int rank, const RequestPtr& request, Clock::time_point now) {
  const ProcessSet& set = *pending.set;
  const int index = set.index_of[static_cast<std::size_t>(rank)];
  HORON_CHECK(index >= 0, "rank ", rank, " announced '", request->name(), "' in process set ",
              request->process_set, ", which it is not in");
  if (set.n_departed > 0) {
    for (const int member : set.ranks) {
      const std::string& reason = departed_[static_cast<std::size_t>(member)];
      if (!reason.empty()) {
        fail_one(rank, *request, reason);
        return;
      }
    }
  }
  if (!pending.is_active) {
    pending.is_active = true;
    pending.request = request;
    pending.first_rank = rank;
    pending.has_announced.assign(set.ranks.size(), false);
    pending.n_announced = 0;
    pending.mismatch.reset();
    pending.since = now;
    pending.place = active_.insert(active_.end(), &pending);
  }
  HORON_CHECK(!pending.has_announced[static_cast<std::size_t>(index)], "rank ", rank,
              " announced '", request->name(), "' twice");
  pending.has_announced[static_cast<std::size_t>(index)] = true;
  ++pending.n_announced;
  if (!pending.mismatch && !is_same(*pending.request, *request)) {
    pending.mismatch = find_mismatch(*pending.request, pending.first_rank, *request, rank);
  }
  if (is_complete(pending)) {
    settle(pending);
  }
}

bool Agreement::is_complete(const Pending& pending) const {
  const std::vector<int>& ranks = pending.set->ranks;
  if (pending.n_announced == static_cast<int>(ranks.size())) {
    return true;
  }
  if (n_joined_ == 0) {
    return false;
  }
  for (std::size_t index = 0; index < ranks.size(); ++index) {
    if (!pending.has_announced[index] && !joined_[static_cast<std::size_t>(ranks[index])]) {
      return false;
    }
  }
  return true;
}

// Requires that it is complete.
void Agreement::settle(Pending& pending) {
  if (pending.mismatch) {
    fail(pending, *pending.mismatch);
  } else if (pending.request->kind == NamedKind::kAddProcessSet) {
    add_process_set(pending);
  } else if (pending.request->kind == NamedKind::kRemoveProcessSet) {
    remove_process_set(pending);
  } else if (const std::string refusal = refuse_join(pending); !refusal.empty()) {
    fail(pending, refusal);
  } else {
    run(pending);
  }
  close(pending);
}

std::string Agreement::refuse_join(const Pending& pending) const {
  const NamedRequest& request = *pending.request;
  if (pending.n_announced == static_cast<int>(pending.set->ranks.size())) {
    return {};
  }
  const char* name = nullptr;
  switch (request.kind) {
    case NamedKind::kAllGather:
      name = "Allgather";
      break;
    case NamedKind::kBroadcast:
      name = "Broadcast";
      break;
    case NamedKind::kReduceScatter:
      name = "Reducescatter";
      break;
    case NamedKind::kAllToAll:
      name = "Alltoall";
      break;
    default:
      return {};
  }
  if (!join_everything_) {
    return concat(name, " is not supported with Join at this time: '", request.name(), "', which ",
                  name_ranks(joined_members(pending)),
                  " can not announce after join(). With HORON_JOIN_ALL_OPERATIONS=1 they take part "
                  "with no rows.",
                  request.kind == NamedKind::kAllGather
                      ? " Specify sparse_as_dense=True if using DistributedOptimizer."
                      : "");
  }
  if (request.kind == NamedKind::kBroadcast &&
      !pending.has_announced[static_cast<std::size_t>(
          pending.set->index_of[static_cast<std::size_t>(request.root)])]) {
    return concat("BROADCAST '", request.name(), "': its root, rank ", request.root,
                  ", has joined and has nothing to send.");
  }
  return {};
}

void Agreement::run(Pending& pending) {
  Decision decision;
  decision.process_set = pending.request->process_set;
  decision.request = pending.request;
  decision.type = Decision::Type::kRun;
  for (const RequestId id : pending.ids) {
    if (is_same(*known_[id].request, *pending.request)) {
      decision.type = Decision::Type::kRunKnown;
      decision.id = id;
    }
  }
  if (decision.type == Decision::Type::kRun && pending.ids.size() < kMaxIdsPerName &&
      known_.size() < kNoId && was_seen_before(pending.key)) {
    decision.id = static_cast<RequestId>(known_.size());
    known_.push_back({pending.request, &pending});
    pending.ids.push_back(decision.id);
  }
  decisions_.push_back(std::move(decision));
}

bool Agreement::was_seen_before(const std::string& key) {
  const std::size_t hash = std::hash<std::string>()(key);
  if (seen_.count(hash) != 0 || seen_before_.count(hash) != 0) {
    return true;
  }
  if (seen_.size() >= kSeenNames) {
    seen_before_ = std::exchange(seen_, {});
  }
  seen_.insert(hash);
  return false;
}

void Agreement::close(Pending& pending) {
  active_.erase(pending.place);
  pending.is_active = false;
  pending.request.reset();
  if (pending.ids.empty()) {
    const std::string key = std::move(pending.key);
    pending_.erase(key);  // and `pending` with it
  }
}

void Agreement::add_process_set(const Pending& pending) {
  ProcessSet set;
  set.ranks.assign(pending.request->ranks.begin(), pending.request->ranks.end());
  set.index_of.assign(static_cast<std::size_t>(n_ranks_), -1);
  for (const auto& [id, known] : sets_) {
    if (known.ranks == set.ranks && !known.is_removed) {
      fail(pending, concat("a process set with the same ranks exists already: number ", id, '.'),
           true);
      return;
    }
  }
  for (std::size_t index = 0; index < set.ranks.size(); ++index) {
    set.index_of[static_cast<std::size_t>(set.ranks[index])] = static_cast<int>(index);
  }
  Decision decision;
  decision.type = Decision::Type::kSetAdded;
  decision.value = next_set_++;
  decision.request = pending.request;
  sets_[decision.value] = std::move(set);
  decisions_.push_back(std::move(decision));
}

void Agreement::remove_process_set(const Pending& pending) {
  const int id = pending.request->root;
  const auto found = sets_.find(id);
  if (id == 0 || found == sets_.end() || found->second.is_removed) {
    fail(pending,
         concat("process set ", id, id == 0 ? " holds all ranks and stays." : " does not exist."),
         true);
    return;
  }
  for (auto entry = pending_.begin(); entry != pending_.end();) {
    Pending& other = *entry->second;
    if (other.set != &found->second) {
      ++entry;
      continue;
    }
    if (other.is_active) {
      fail(other, concat("process set ", id, " was removed while rank ", other.first_rank,
                         " had announced '", other.request->name(), "'."));
      active_.erase(other.place);
    }
    for (const RequestId known : other.ids) {
      known_[known].pending = nullptr;
    }
    entry = pending_.erase(entry);
  }
  Decision decision;
  decision.type = Decision::Type::kSetRemoved;
  decision.value = id;
  decision.request = pending.request;
  decisions_.push_back(std::move(decision));
  // Not yet erased: whoever delivers the decisions wants to know its members.
  found->second.is_removed = true;
}

void Agreement::fail(const Pending& pending, const std::string& text, bool is_usage_error,
                     std::vector<int> only_ranks) {
  Decision decision;
  decision.type = Decision::Type::kFail;
  decision.is_usage_error = is_usage_error;
  decision.process_set = pending.request->process_set;
  decision.name = pending.request->name();
  decision.text = text;
  decision.only_ranks = only_ranks.empty() ? announcers(pending) : std::move(only_ranks);
  decisions_.push_back(std::move(decision));
}

void Agreement::fail_one(int rank, const NamedRequest& request, const std::string& text) {
  Decision decision;
  decision.type = Decision::Type::kFail;
  decision.process_set = request.process_set;
  decision.name = request.name();
  decision.text = text;
  decision.only_ranks = {rank};
  decisions_.push_back(std::move(decision));
}

void Agreement::join(int rank) {
  HORON_CHECK(!joined_[static_cast<std::size_t>(rank)], "rank ", rank, " joined twice");
  joined_[static_cast<std::size_t>(rank)] = true;
  ++n_joined_;
  last_joined_ = rank;
  if (n_departed_ > 0) {
    settle_joins();
    return;
  }
  settle_all();
  settle_joins();
}

void Agreement::settle_all() {
  for (auto at = active_.begin(); at != active_.end();) {
    Pending& pending = **at++;
    if (is_complete(pending)) {
      const bool takes_others = pending.request->kind == NamedKind::kRemoveProcessSet;
      settle(pending);
      if (takes_others) {
        at = active_.begin();  // the next may be among those that went with the process set
      }
    }
  }
}

// All have joined, or one of them never will.
void Agreement::settle_joins() {
  if (n_joined_ == 0 || (n_joined_ < n_ranks_ && n_departed_ == 0)) {
    return;
  }
  Decision decision;
  decision.type = Decision::Type::kJoined;
  decision.value = last_joined_;
  if (n_departed_ > 0) {
    const auto reason = std::find_if(departed_.begin(), departed_.end(),
                                     [](const std::string& text) { return !text.empty(); });
    decision.type = Decision::Type::kFail;
    decision.name = kJoinName;
    decision.text = *reason;
    for (int rank = 0; rank < n_ranks_; ++rank) {
      if (joined_[static_cast<std::size_t>(rank)]) {
        decision.only_ranks.push_back(rank);
      }
    }
  }
  joined_.assign(joined_.size(), false);
  n_joined_ = 0;
  decisions_.push_back(std::move(decision));
}

void Agreement::depart(int rank, const std::string& reason) {
  std::string& known = departed_[static_cast<std::size_t>(rank)];
  if (!known.empty()) {
    return;
  }
  known = reason;
  ++n_departed_;
  if (joined_[static_cast<std::size_t>(rank)]) {
    joined_[static_cast<std::size_t>(rank)] = false;
    --n_joined_;
  }
  for (auto& [id, set] : sets_) {
    set.n_departed += set.index_of[static_cast<std::size_t>(rank)] >= 0 ? 1 : 0;
  }
  for (auto at = active_.begin(); at != active_.end();) {
    Pending& pending = **at++;
    const int index = pending.set->index_of[static_cast<std::size_t>(rank)];
    if (index < 0) {
      continue;
    }
    if (pending.has_announced[static_cast<std::size_t>(index)]) {
      pending.has_announced[static_cast<std::size_t>(index)] = false;
      --pending.n_announced;
    }
    if (pending.n_announced > 0) {
      fail(pending, reason);
    }
    close(pending);
  }
  settle_joins();
  Decision goodbye;
  goodbye.type = Decision::Type::kGoodbye;
  goodbye.only_ranks = {rank};
  decisions_.push_back(std::move(goodbye));
}

std::vector<int> Agreement::announcers(const Pending& pending) const {
  std::vector<int> ranks;
  for (std::size_t index = 0; index < pending.set->ranks.size(); ++index) {
    if (pending.has_announced[index]) {
      ranks.push_back(pending.set->ranks[index]);
    }
  }
  return ranks;
}

std::vector<int> Agreement::joined_members(const Pending& pending) const {
  std::vector<int> ranks = pending.set->ranks;
  std::erase_if(ranks, [&](int rank) { return !joined_[static_cast<std::size_t>(rank)]; });
  return ranks;
}

std::vector<int> Agreement::missing(const Pending& pending) const {
  std::vector<int> ranks;
  for (std::size_t index = 0; index < pending.set->ranks.size(); ++index) {
    const int rank = pending.set->ranks[index];
    if (!pending.has_announced[index] && !joined_[static_cast<std::size_t>(rank)]) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

std::vector<StalledOperation> Agreement::stalled(Clock::time_point now, Clock::duration age) const {
  std::vector<StalledOperation> stalled;
  for (const Pending* pending : active_) {
    if (now - pending->since < age) {
      break;  // the rest is younger
    }
    stalled.push_back({pending->request->name(), pending->request->kind,
                       pending->request->process_set, announcers(*pending), missing(*pending),
                       now - pending->since});
  }
  return stalled;
}

void Agreement::fail_stalled(Clock::time_point now, Clock::duration age) {
  const std::vector<StalledOperation> overdue = stalled(now, age);
  for (const StalledOperation& operation : overdue) {
    Pending& pending = *active_.front();
    fail(pending, stall_error(operation));
    close(pending);
  }
}

}  // namespace horon
