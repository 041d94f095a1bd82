// The coordinator's mind: who has announced what, and what follows from it.
//
// Note [Agreement]
// An operation is agreed when every member of its process set has announced its name or has
// joined. Decisions come out in one order over all process sets: ranks that carry theirs out one
// after another, blocking, never wait in a circle. A disagreement is found when the last member has
// announced; it fails that name on every member and changes nothing else. A group of tensors is one
// request, so it is agreed and fails as a whole. A rank that leaves fails what only it could have
// completed.
//
// Known ids: a request that is agreed for the second time gets a number, which its decision carries
// to all members. From then on it travels as that number. Names that never come again get none, and
// are remembered for a while only, so that memory does not grow with them.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/deadline.h"
#include "named/decision.h"
#include "named/stall.h"

namespace horon {

// Thread safety: none. No I/O: time comes in as an argument.
class Agreement {
 public:
  // With `join_everything` ranks that have joined take part in every kind of operation; otherwise,
  // as in Horovod, only in reductions and barriers, and the others fail.
  explicit Agreement(int n_ranks, bool join_everything = false);
  ~Agreement();

  // What `rank` says. Throws Error for what no healthy rank would say.
  void announce(int rank, const RequestPtr& request, Clock::time_point now);
  void announce_known(int rank, RequestId id, Clock::time_point now);
  // The rank has no more data: from now on it takes part without being asked, with zeros, until all
  // others have joined, too.
  void join(int rank);
  // The rank leaves; `reason` goes to whom it lets down.
  void depart(int rank, const std::string& reason);

  // What was decided since the last call, in order.
  std::vector<Decision> take();

  // Sorted. Null when there is no such process set. Of a set that was removed, until the next
  // take().
  const std::vector<int>* members(int process_set) const;
  // Whether the rank is in the set.
  bool is_member(int process_set, int rank) const;

  // Whether somebody waits for others.
  bool is_waiting() const { return !active_.empty() || n_joined_ > 0; }
  // What has not been agreed on since `before`.
  std::vector<StalledOperation> stalled(Clock::time_point now, Clock::duration age) const;
  // Fails what has been waiting for that long.
  void fail_stalled(Clock::time_point now, Clock::duration age);

 private:
  struct Pending;
  struct ProcessSet;
  using PendingList = std::list<Pending*>;

  struct Known {
    RequestPtr request;
    Pending* pending = nullptr;  // null when its process set is gone
  };

  void check(int rank, const NamedRequest& request) const;
  Pending& pending_of(const RequestPtr& request);
  void add(Pending& pending, int rank, const RequestPtr& request, Clock::time_point now);
  bool is_complete(const Pending& pending) const;
  void settle(Pending& pending);
  // Why joined ranks can't take part; empty if they can, or if there are none.
  std::string refuse_join(const Pending& pending) const;
  void run(Pending& pending);
  void add_process_set(const Pending& pending);
  void remove_process_set(const Pending& pending);
  void fail(const Pending& pending, const std::string& text, bool is_usage_error = false,
            std::vector<int> only_ranks = {});
  void fail_one(int rank, const NamedRequest& request, const std::string& text);
  // The name is free again.
  void close(Pending& pending);
  bool was_seen_before(const std::string& key);
  void settle_joins();
  void settle_all();
  std::vector<int> announcers(const Pending& pending) const;
  std::vector<int> missing(const Pending& pending) const;
  std::vector<int> joined_members(const Pending& pending) const;

  const int n_ranks_;
  const bool join_everything_;
  std::map<int, ProcessSet> sets_;
  int next_set_ = 1;
  std::unordered_map<std::string, std::unique_ptr<Pending>> pending_;  // by key_of
  PendingList active_;                                                 // oldest first
  std::vector<Known> known_;                                           // by id
  std::vector<bool> joined_;                                           // by rank
  int n_joined_ = 0;
  int last_joined_ = -1;
  std::vector<std::string> departed_;  // by rank: why; empty while it is here
  int n_departed_ = 0;
  // Hashes of keys that were agreed once: two generations.
  std::unordered_set<std::size_t> seen_;
  std::unordered_set<std::size_t> seen_before_;
  std::vector<Decision> decisions_;
};

}  // namespace horon
