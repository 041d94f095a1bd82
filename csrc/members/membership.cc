#include "members/membership.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "core/digest.h"
#include "core/error.h"

namespace horon {

Membership plan_membership(const std::vector<std::string>& handles, bool is_order_given,
                           std::uint64_t own) {
  if (handles.empty()) {
    throw UsageError("expected the handle of each member, got none");
  }
  Membership plan;
  std::transform(handles.begin(), handles.end(), std::back_inserter(plan.members),
                 &MemberHandle::decode);
  if (!is_order_given) {
    std::sort(plan.members.begin(), plan.members.end(), [](const auto& left, const auto& right) {
      return std::tie(left.rank, left.instance) < std::tie(right.rank, right.instance);
    });
  }
  std::unordered_map<std::uint64_t, int> ranks;
  plan.digest = kEmptyDigest;
  for (const MemberHandle& member : plan.members) {
    const int rank = static_cast<int>(ranks.size());
    const auto [known, is_new] = ranks.emplace(member.instance, rank);
    if (!is_new) {
      throw UsageError(concat("the handle of process ", member.process.pid,
                              " comes twice, as rank ", known->second, " and as rank ", rank,
                              "; each member has one"));
    }
    plan.digest = fold_in(plan.digest, member.instance);
  }
  const auto found = ranks.find(own);
  if (found == ranks.end()) {
    throw UsageError(concat("none of the ", handles.size(), " handles is this process's own. Only ",
                            "members of the new group call this, each with the handle that it ",
                            "gave to the others"));
  }
  plan.rank = found->second;
  return plan;
}

MemberWatch::MemberWatch(const Membership& membership) {
  const MemberHandle& own = own_member(membership);
  int rank = 0;
  for (const MemberHandle& member : membership.members) {
    if (rank != membership.rank && !own.boot_id.empty() && member.boot_id == own.boot_id &&
        member.process != own.process) {
      watched_.push_back({rank, member.process.pid, ProcessWatch(member.process)});
    }
    ++rank;
  }
}

void MemberWatch::check(const char* before_what) const {
  for (const Watched& member : watched_) {
    if (member.watch.has_ended()) {
      throw PeerLostError(
          concat("rank ", member.rank, " (pid ", member.pid, ") has ended before ", before_what));
    }
  }
}

}  // namespace horon
