// NCCL as far as one rank can see it: records every call, and is in progress, fails or blocks as
// told.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/error.h"
#include "nccl/nccl_api.h"

// NCCL leaves it undefined for its users; this is the fake's.
struct ncclComm {
  int id = 0;
  int rank = 0;
  int n_ranks = 0;
  int polls_in_progress = 0;
  bool is_freed = false;
};

namespace horon::testing {

inline constexpr int kForEver = -1;

// Thread safety: any thread.
class FakeNccl final : public NcclApi {
 public:
  // How many polls a communicator answers "in progress" after each call that queues something.
  void stay_in_progress(int polls) {
    const std::lock_guard lock(mutex_);
    polls_in_progress_ = polls;
  }
  // The next call of that name gives this result.
  void fail(const std::string& call, NcclResult result) {
    const std::lock_guard lock(mutex_);
    failures_[call] = result;
  }
  void set_async_error(NcclResult result) {
    const std::lock_guard lock(mutex_);
    async_error_ = result;
  }
  // Calls of that name wait inside NCCL until unblock().
  void block(const std::string& call) {
    const std::lock_guard lock(mutex_);
    blocked_ = call;
  }
  void unblock() {
    const std::lock_guard lock(mutex_);
    blocked_.clear();
    changed_.notify_all();
  }
  void await_blocked_caller() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return callers_inside_ > 0; });
  }
  bool has_blocked_caller() {
    const std::lock_guard lock(mutex_);
    return callers_inside_ > 0;
  }

  // What was called since the last time, without polls.
  std::vector<std::string> take_calls() {
    const std::lock_guard lock(mutex_);
    return std::exchange(calls_, {});
  }
  int polls() {
    const std::lock_guard lock(mutex_);
    return polls_;
  }
  // Calls that no user of NCCL may make: on a freed communicator, on one that is in progress, or
  // an abort while another thread is inside.
  std::vector<std::string> violations() {
    const std::lock_guard lock(mutex_);
    return violations_;
  }
  int group_depth() {
    const std::lock_guard lock(mutex_);
    return group_depth_;
  }

  int version() override { return 23007; }
  std::string error_text(NcclResult result) override {
    return concat("error text ", static_cast<int>(result));
  }
  std::string last_error(NcclCommHandle) override { return "the fake's last error"; }

  NcclResult get_unique_id(NcclUniqueId* id) override {
    std::unique_lock lock(mutex_);
    id->bytes.fill(static_cast<char>(++ids_));
    return record(lock, "get_unique_id");
  }
  NcclResult comm_init(NcclCommHandle* comm, int n_ranks, const NcclUniqueId& id, int rank,
                       const NcclConfig& config) override {
    std::unique_lock lock(mutex_);
    *comm = make_comm(rank, n_ranks);
    return begin(lock, *comm,
                 concat("comm_init ", rank, '/', n_ranks, " id=", static_cast<int>(id.bytes[0]),
                        config.is_blocking ? " blocking" : ""));
  }
  // The children of this fake are made at once, with the parent's rank and size.
  NcclResult comm_split(NcclCommHandle comm, int color, int key, NcclCommHandle* child,
                        const NcclConfig&) override {
    std::unique_lock lock(mutex_);
    if (color >= 0) {
      *child = make_comm(key, comm->n_ranks);
    }
    return begin(lock, comm, concat("comm_split color=", color, " key=", key));
  }
  NcclResult comm_shrink(NcclCommHandle comm, const std::vector<int>& excluded, bool aborts_parent,
                         NcclCommHandle* child, const NcclConfig&) override {
    std::unique_lock lock(mutex_);
    *child = make_comm(comm->rank, comm->n_ranks - static_cast<int>(excluded.size()));
    return begin(lock, comm,
                 concat("comm_shrink -", excluded.size(), aborts_parent ? " abort" : ""));
  }
  NcclResult comm_finalize(NcclCommHandle comm) override {
    std::unique_lock lock(mutex_);
    return begin(lock, comm, "comm_finalize");
  }
  NcclResult comm_destroy(NcclCommHandle comm) override {
    std::unique_lock lock(mutex_);
    use(comm, "comm_destroy");
    comm->is_freed = true;
    return record(lock, "comm_destroy");
  }
  NcclResult comm_abort(NcclCommHandle comm) override {
    std::unique_lock lock(mutex_);
    if (comm->is_freed || callers_inside_ > 0) {
      violations_.push_back("comm_abort of a communicator that is freed or in use");
    }
    comm->is_freed = true;
    return record(lock, concat("comm_abort #", comm->id));
  }
  NcclResult comm_async_error(NcclCommHandle comm, NcclResult* error) override {
    const std::lock_guard lock(mutex_);
    if (comm->is_freed) {
      violations_.push_back("comm_async_error of a freed communicator");
    }
    ++polls_;
    *error = async_error_;
    if (comm->polls_in_progress != 0 && async_error_ == NcclResult::kSuccess) {
      comm->polls_in_progress -= comm->polls_in_progress > 0 ? 1 : 0;
      *error = NcclResult::kInProgress;
    }
    return NcclResult::kSuccess;
  }
  NcclResult comm_count(NcclCommHandle comm, int* n_ranks) override {
    *n_ranks = comm->n_ranks;
    return NcclResult::kSuccess;
  }
  NcclResult comm_rank(NcclCommHandle comm, int* rank) override {
    *rank = comm->rank;
    return NcclResult::kSuccess;
  }

  NcclResult group_start() override {
    std::unique_lock lock(mutex_);
    ++group_depth_;
    return record(lock, "group_start");
  }
  NcclResult group_end() override {
    std::unique_lock lock(mutex_);
    --group_depth_;
    ncclComm* comm = std::exchange(grouped_, nullptr);
    return comm == nullptr ? record(lock, "group_end") : begin(lock, comm, "group_end");
  }

  NcclResult all_reduce(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                        NcclReduceOp op, NcclCommHandle comm, StreamHandle stream) override {
    return collective("all_reduce", send, recv, count, dtype, comm, stream, op_text(op));
  }
  NcclResult broadcast(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                       int root, NcclCommHandle comm, StreamHandle stream) override {
    return collective("broadcast", send, recv, count, dtype, comm, stream, concat(" root=", root));
  }
  NcclResult reduce(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                    NcclReduceOp op, int root, NcclCommHandle comm, StreamHandle stream) override {
    return collective("reduce", send, recv, count, dtype, comm, stream,
                      concat(op_text(op), " root=", root));
  }
  NcclResult all_gather(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                        NcclCommHandle comm, StreamHandle stream) override {
    return collective("all_gather", send, recv, count, dtype, comm, stream, "");
  }
  NcclResult reduce_scatter(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                            NcclReduceOp op, NcclCommHandle comm, StreamHandle stream) override {
    return collective("reduce_scatter", send, recv, count, dtype, comm, stream, op_text(op));
  }
  NcclResult send(const void* send, std::size_t count, NcclDataType dtype, int peer,
                  NcclCommHandle comm, StreamHandle stream) override {
    return collective("send", send, nullptr, count, dtype, comm, stream, concat(" peer=", peer));
  }
  NcclResult recv(void* recv, std::size_t count, NcclDataType dtype, int peer, NcclCommHandle comm,
                  StreamHandle stream) override {
    return collective("recv", nullptr, recv, count, dtype, comm, stream, concat(" peer=", peer));
  }

  NcclResult create_premul_sum(NcclReduceOp* op, const void* factor, NcclDataType dtype,
                               NcclCommHandle comm) override {
    std::unique_lock lock(mutex_);
    use(comm, "create_premul_sum");
    float value = 0;
    std::memcpy(&value, factor, sizeof value);  // the tests use float32
    *op = static_cast<NcclReduceOp>(++last_op_);
    return record(lock, concat("create_premul_sum ", value, " dtype=", static_cast<int>(dtype),
                               " -> ", last_op_));
  }
  NcclResult destroy_op(NcclReduceOp op, NcclCommHandle comm) override {
    std::unique_lock lock(mutex_);
    if (comm->is_freed) {
      violations_.push_back("destroy_op on a freed communicator");
    }
    return record(lock, concat("destroy_op ", static_cast<int>(op)));
  }

 private:
  static std::string op_text(NcclReduceOp op) { return concat(" op=", static_cast<int>(op)); }

  ncclComm* make_comm(int rank, int n_ranks) {
    comms_.push_back({static_cast<int>(comms_.size()), rank, n_ranks, polls_in_progress_, false});
    return &comms_.back();
  }

  void use(ncclComm* comm, const char* call) {
    if (comm->is_freed) {
      violations_.push_back(concat(call, " on a freed communicator"));
    } else if (comm->polls_in_progress != 0) {
      violations_.push_back(concat(call, " on a communicator that is in progress"));
    }
  }

  NcclResult collective(const char* name, const void* send, void* recv, std::size_t count,
                        NcclDataType dtype, ncclComm* comm, StreamHandle stream,
                        const std::string& rest) {
    std::unique_lock lock(mutex_);
    use(comm, name);
    const std::string text = concat(name, " count=", count, " dtype=", static_cast<int>(dtype),
                                    rest, send != nullptr && send == recv ? " in place" : "",
                                    " stream=", reinterpret_cast<std::uintptr_t>(stream));
    if (group_depth_ > 0) {
      grouped_ = comm;
      return record(lock, text, name);
    }
    return begin(lock, comm, text, name);
  }

  NcclResult begin(std::unique_lock<std::mutex>& lock, ncclComm* comm, const std::string& text,
                   const std::string& name = "") {
    comm->polls_in_progress = polls_in_progress_;
    const NcclResult result = record(lock, text, name);
    return result == NcclResult::kSuccess && polls_in_progress_ != 0 ? NcclResult::kInProgress
                                                                     : result;
  }

  // `name` tells block() and fail() what the call is; by default the first word.
  NcclResult record(std::unique_lock<std::mutex>& lock, const std::string& text,
                    const std::string& name = "") {
    const std::string call = name.empty() ? text.substr(0, text.find(' ')) : name;
    calls_.push_back(text);
    if (blocked_ == call) {
      ++callers_inside_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return blocked_ != call; });
      --callers_inside_;
    }
    const auto failure = failures_.find(call);
    if (failure == failures_.end()) {
      return NcclResult::kSuccess;
    }
    const NcclResult result = failure->second;
    failures_.erase(failure);
    return result;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::deque<ncclComm> comms_;  // never freed, so that a use after free can be seen
  std::vector<std::string> calls_;
  std::vector<std::string> violations_;
  std::map<std::string, NcclResult> failures_;
  std::string blocked_;
  NcclResult async_error_ = NcclResult::kSuccess;
  ncclComm* grouped_ = nullptr;
  int polls_in_progress_ = 0;
  int polls_ = 0;
  int callers_inside_ = 0;
  int group_depth_ = 0;
  int ids_ = 0;
  int last_op_ = 100;
};

}  // namespace horon::testing
