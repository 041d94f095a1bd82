#include "nccl/communicator.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "core/error.h"
#include "core/fork_guard.h"
#include "core/log.h"

namespace horon {
namespace {

// A launch takes NCCL's thread some tens of microseconds, making a communicator up to seconds.
constexpr int kYieldingPolls = 200;
constexpr std::chrono::microseconds kFirstPause{20};
constexpr std::chrono::microseconds kLongestPause{1000};

bool is_fine(NcclResult result) {
  return result == NcclResult::kSuccess || result == NcclResult::kInProgress;
}

[[noreturn]] void throw_as(NcclResult result, const std::string& message) {
  switch (result) {
    case NcclResult::kInvalidArgument:
    case NcclResult::kInvalidUsage:
      throw UsageError(message);
    case NcclResult::kRemoteError:
      throw PeerLostError(message);
    default:
      throw GroupError(message);
  }
}

}  // namespace

Communicator::Communicator(NcclApi& api, int rank, int n_ranks)
    : api_(api), rank_(rank), n_ranks_(n_ranks), fork_generation_(fork_generation()) {}

Communicator::Use::Use(Communicator& communicator, const std::string& operation, Failed failed)
    : communicator_(communicator), operation_(operation) {
  const std::lock_guard lock(communicator_.mutex_);
  const bool has_failed = !communicator_.over_because_.empty();
  if (communicator_.state_ != State::kOpen || (has_failed && failed == Failed::kRefuse)) {
    throw GroupError(concat(operation, ": the communicator of rank ", communicator_.rank_,
                            " can not be used any more: ", communicator_.over_because_));
  }
  ++communicator_.users_;
}

Communicator::Use::~Use() { communicator_.end_use(); }

void Communicator::end_use() {
  const std::lock_guard lock(mutex_);
  --users_;
  changed_.notify_all();
}

bool Communicator::Use::is_over() const {
  const std::lock_guard lock(communicator_.mutex_);
  return communicator_.state_ == State::kOver;
}

void Communicator::Use::check(NcclResult result, const char* call) const {
  communicator_.check(result, operation_, call);
}

void Communicator::Use::await_ready(const Deadline& deadline) const {
  communicator_.await_ready(operation_, deadline);
}

std::unique_ptr<Communicator> Communicator::connect(NcclApi& api, const NcclUniqueId& id, int rank,
                                                    int n_ranks, const NcclConfig& config,
                                                    const Deadline& deadline) {
  std::unique_ptr<Communicator> made(new Communicator(api, rank, n_ranks));
  const std::string operation =
      concat("connecting communicator '", config.name, "' of ", n_ranks, " ranks");
  const NcclResult result = api.comm_init(&made->handle_, n_ranks, id, rank, config);
  made->check(result, operation, "ncclCommInitRankConfig");
  made->await_ready(operation, deadline);
  return made;
}

Communicator::~Communicator() {
  try {
    abort("it was destroyed");
  } catch (const std::exception& error) {
    log_warning(concat("destroying a communicator: ", error.what()));
  }
}

void Communicator::check(NcclResult result, const std::string& operation, const char* call) {
  if (is_fine(result)) {
    return;
  }
  const std::string message =
      concat(operation, ": ", call, " failed on rank ", rank_, " of ", n_ranks_, ": ",
             api_.error_text(result), " (", static_cast<int>(result),
             "); NCCL says: ", api_.last_error(handle_), ". Run with NCCL_DEBUG=WARN for more.");
  // A refused call has changed nothing; everything else leaves the communicator in doubt.
  if (result != NcclResult::kInvalidArgument && result != NcclResult::kInvalidUsage) {
    remember_failure(message);
  }
  throw_as(result, message);
}

void Communicator::remember_failure(const std::string& what) {
  const std::lock_guard lock(mutex_);
  if (over_because_.empty()) {
    over_because_ = what;
  }
}

NcclResult Communicator::poll(const std::string& operation) {
  NcclResult state = NcclResult::kSuccess;
  check(api_.comm_async_error(handle_, &state), operation, "ncclCommGetAsyncError");
  return state;
}

void Communicator::await_ready(const std::string& operation, const Deadline& deadline) {
  check(await_state(operation, deadline), operation, "what it had begun");
}

NcclResult Communicator::await_state(const std::string& operation, const Deadline& deadline) {
  int polls = 0;
  std::chrono::microseconds pause = kFirstPause;
  // In a use, the handle stays valid: abort() waits for the use to end.
  for (;;) {
    const NcclResult state = poll(operation);
    if (state != NcclResult::kInProgress) {
      return state;
    }
    {
      std::unique_lock lock(mutex_);
      const auto is_over = [this] { return state_ == State::kOver; };
      if (is_over()) {
        throw GroupError(concat(operation, ": aborted on rank ", rank_, ": ", over_because_));
      }
      if (++polls > kYieldingPolls) {
        changed_.wait_for(lock, pause, is_over);
        pause = std::min(2 * pause, kLongestPause);
      }
    }
    if (polls <= kYieldingPolls) {
      std::this_thread::yield();
    }
    if (deadline.has_passed()) {
      const std::string message = concat(
          operation, ": rank ", rank_, " of ", n_ranks_, " waited ", deadline.timeout().count(),
          " ms for NCCL, which is still in progress. Has every rank made the same calls? "
          "NCCL says: ",
          api_.last_error(handle_));
      remember_failure(message);
      throw TimeoutError(message);
    }
  }
}

template <class Call>
std::unique_ptr<Communicator> Communicator::make_child(const std::string& operation,
                                                       const char* call_name, Use::Failed failed,
                                                       const Deadline& deadline, const Call& call) {
  std::unique_ptr<Communicator> child(new Communicator(api_, 0, 0));
  auto slot = std::make_unique<NcclCommHandle>(nullptr);
  {
    const Use use(*this, operation, failed);
    // Until the parent is ready NCCL may write the slot, so a failure must not free it.
    NcclCommHandle* const handle = slot.get();
    orphans_.push_back(std::move(slot));
    use.check(call(use.handle(), handle), call_name);
    const NcclResult state = await_state(operation, deadline);
    if (failed == Use::Failed::kRefuse) {  // otherwise the parent's state is its old failure
      use.check(state, call_name);
    }
    slot = std::move(orphans_.back());
    orphans_.pop_back();
  }
  if (*slot == nullptr) {
    return nullptr;
  }
  child->handle_ = *slot;
  child->await_ready(operation, deadline);
  child->check(api_.comm_rank(child->handle_, &child->rank_), operation, "ncclCommUserRank");
  child->check(api_.comm_count(child->handle_, &child->n_ranks_), operation, "ncclCommCount");
  return child;
}

std::unique_ptr<Communicator> Communicator::split(int color, int key, const NcclConfig& config,
                                                  const Deadline& deadline) {
  const std::string operation = concat("split of a communicator, color ", color);
  return make_child(operation, "ncclCommSplit", Use::Failed::kRefuse, deadline,
                    [&](NcclCommHandle parent, NcclCommHandle* child) {
                      return api_.comm_split(parent, color, key, child, config);
                    });
}

std::unique_ptr<Communicator> Communicator::shrink(const std::vector<int>& excluded_ranks,
                                                   Shrink mode, const NcclConfig& config,
                                                   const Deadline& deadline) {
  const std::string operation =
      concat("shrink of a communicator by ", excluded_ranks.size(), " ranks");
  const auto failed = mode == Shrink::kAbort ? Use::Failed::kAllow : Use::Failed::kRefuse;
  return make_child(operation, "ncclCommShrink", failed, deadline,
                    [&](NcclCommHandle parent, NcclCommHandle* child) {
                      return api_.comm_shrink(parent, excluded_ranks, mode == Shrink::kAbort, child,
                                              config);
                    });
}

std::optional<std::string> Communicator::check_async_error() {
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::kOpen) {
      return std::nullopt;
    }
    ++users_;
  }
  NcclResult state = NcclResult::kSuccess;
  const NcclResult asked = api_.comm_async_error(handle_, &state);
  const NcclResult found = is_fine(asked) ? state : asked;
  std::optional<std::string> error;
  if (!is_fine(found)) {
    error = concat("NCCL reports on rank ", rank_, " of ", n_ranks_, ": ", api_.error_text(found),
                   " (", static_cast<int>(found), "); ", api_.last_error(handle_));
  }
  end_use();
  return error;
}

void Communicator::abort(const std::string& reason) {
  if (fork_generation_ != fork_generation()) {
    return;  // the parent's
  }
  {
    std::unique_lock lock(mutex_);
    if (state_ == State::kOver) {
      return;
    }
    state_ = State::kOver;
    if (over_because_.empty()) {
      over_because_ = reason;
    }
    changed_.notify_all();
    // See Note [Abort while in use].
    changed_.wait_for(lock, kUsePatience, [this] { return users_ == 0; });
  }
  if (handle_ == nullptr) {
    return;  // it was never made
  }
  const NcclResult result = api_.comm_abort(handle_);
  for (const auto& orphan : orphans_) {
    if (*orphan != nullptr) {
      (void)api_.comm_abort(*orphan);
    }
  }
  if (!is_fine(result)) {
    log_warning(concat("ncclCommAbort on rank ", rank_, ": ", api_.error_text(result)));
  }
}

void Communicator::finalize(const Deadline& deadline) {
  const std::string operation = "closing a communicator";
  std::string failed_before;
  {
    std::unique_lock lock(mutex_);
    if (state_ != State::kOpen) {
      return;
    }
    state_ = State::kFinalizing;  // no new use
    changed_.wait_until(lock, deadline.at(), [this] { return users_ == 0; });
    if (state_ != State::kFinalizing) {
      return;  // aborted meanwhile
    }
    ++users_;  // an abort from now on waits for this
    failed_before = over_because_;
  }
  std::exception_ptr failure;
  try {
    if (!failed_before.empty()) {
      throw GroupError(concat(operation, ": it has failed before: ", failed_before));
    }
    check(api_.comm_finalize(handle_), operation, "ncclCommFinalize");
    await_ready(operation, deadline);
    check(api_.comm_destroy(handle_), operation, "ncclCommDestroy");
    handle_ = nullptr;
  } catch (const Error&) {
    failure = std::current_exception();
  }
  end_use();
  abort("it was closed");  // does nothing more where it was destroyed
  if (failure) {
    std::rethrow_exception(failure);
  }
}

}  // namespace horon
