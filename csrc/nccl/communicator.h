// A communicator of NCCL with an owner, made and used without ever blocking for longer than a
// deadline.
//
// Note [Non-blocking communicators]
// A call that returns ncclInProgress has queued nothing yet: a thread of NCCL does, later. Only
// when ncclCommGetAsyncError no longer says ncclInProgress may an event be recorded, or anything
// else be called. So every use ends with await_ready(). NCCL has nothing to wait on; it is polled,
// by yielding at first, then with pauses that abort() cuts short.
//
// Note [Abort while in use]
// ncclCommAbort frees the communicator. Uses are counted: abort() makes polling ones end, and new
// ones fail, waits for those under way to get out of NCCL, and only then aborts. A use that does
// not come back (NCCL or the driver hang inside a call) is waited for kUsePatience; then
// ncclCommAbort is called anyway, which is what NCCL has it for.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "nccl/nccl_api.h"

namespace horon {

// Thread safety: use(), split(), shrink() and finalize() belong to one thread at a time;
// check_async_error() and abort() may come from any thread, also while another is in a use.
// Ownership: the api must outlive it.
class Communicator {
 public:
  static constexpr std::chrono::seconds kUsePatience{2};

  // Blocks until all ranks have come; the current device becomes this rank's. Throws TimeoutError
  // at the deadline, GroupError and its kinds when NCCL fails.
  static std::unique_ptr<Communicator> connect(NcclApi& api, const NcclUniqueId& id, int rank,
                                               int n_ranks, const NcclConfig& config,
                                               const Deadline& deadline);

  // Aborts, unless finalize() or abort() came first.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int n_ranks() const { return n_ranks_; }

  // While it lives, the communicator is not freed. `operation` is for messages and must outlive it.
  class Use {
   public:
    // Throws GroupError with the reason when the communicator was aborted or has failed.
    Use(Communicator& communicator, const std::string& operation)
        : Use(communicator, operation, Failed::kRefuse) {}
    Use(Communicator&, std::string&&) = delete;  // it would be gone before the first message
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    NcclCommHandle handle() const { return communicator_.handle_; }
    // Aborted meanwhile: where it had to be done without waiting for this use, it is freed.
    bool is_over() const;
    // Throws what NCCL's answer to `call` means, unless it is success or in progress.
    void check(NcclResult result, const char* call) const;
    // See Note [Non-blocking communicators]. Throws TimeoutError at the deadline, GroupError when
    // aborted meanwhile. After either the communicator can only be aborted.
    void await_ready(const Deadline& deadline) const;

   private:
    friend class Communicator;
    // Whether a communicator that has failed, but was not aborted, may be used.
    enum class Failed : std::uint8_t { kRefuse, kAllow };
    Use(Communicator& communicator, const std::string& operation, Failed failed);

    Communicator& communicator_;
    const std::string& operation_;
  };

  // All ranks must call it. Those with the same color (not negative) get a communicator in the
  // order of their keys; those with a negative one get null. Throws as connect().
  std::unique_ptr<Communicator> split(int color, int key, const NcclConfig& config,
                                      const Deadline& deadline);

  enum class Shrink : std::uint8_t {
    kIdle,   // nothing is under way
    kAbort,  // operations may hang because a rank died; NCCL ends them first
  };
  // All ranks but the excluded ones must call it; with kAbort also after a failure. Throws as
  // connect(), and UsageError where this NCCL has no shrink (before 2.27).
  std::unique_ptr<Communicator> shrink(const std::vector<int>& excluded_ranks, Shrink mode,
                                       const NcclConfig& config, const Deadline& deadline);

  // What went wrong in the background (a peer died, the network failed), for a thread that watches.
  // Nothing while all is well, or over. Does not block.
  std::optional<std::string> check_async_error();

  // Ends what is under way on this rank, on the host and on the GPU; later uses fail with the
  // reason. Idempotent: the first reason stays. Blocks for kUsePatience at most, besides NCCL.
  void abort(const std::string& reason);

  // Waits for what was queued, on all ranks, and frees everything. Idempotent, also after abort().
  // At the deadline, or when it fails, it aborts instead and throws.
  void finalize(const Deadline& deadline);

 private:
  Communicator(NcclApi& api, int rank, int n_ranks);

  void check(NcclResult result, const std::string& operation, const char* call);
  void await_ready(const std::string& operation, const Deadline& deadline);
  // NCCL's state; throws when it can not be asked.
  NcclResult poll(const std::string& operation);
  // As await_ready, but returns the first state that is not in progress.
  NcclResult await_state(const std::string& operation, const Deadline& deadline);
  // Makes a child by `call`, which writes its handle, and waits until it is ready.
  template <class Call>
  std::unique_ptr<Communicator> make_child(const std::string& operation, const char* call_name,
                                           Use::Failed failed, const Deadline& deadline,
                                           const Call& call);
  void remember_failure(const std::string& what);
  void end_use();

  enum class State : std::uint8_t { kOpen, kFinalizing, kOver };

  // Constant after connect().
  NcclApi& api_;
  int rank_;
  int n_ranks_;
  const std::uint32_t fork_generation_;
  NcclCommHandle handle_ = nullptr;
  // Handles of children that failed to become ready: NCCL may still write them. Belongs to the use
  // that splits; to abort() when no use is under way.
  std::vector<std::unique_ptr<NcclCommHandle>> orphans_;

  std::mutex mutex_;
  std::condition_variable changed_;  // users_, state_
  // Guarded by mutex_:
  State state_ = State::kOpen;
  int users_ = 0;
  std::string over_because_;  // not empty: no new use
};

}  // namespace horon
