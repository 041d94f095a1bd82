// Named operations: submitted in any order, agreed between the ranks, fused, carried out.
//
// Note [Attending]
// One thread at a time attends: it announces what was submitted, takes messages, decides (on rank
// 0) and carries out what is agreed. Whoever waits for a result attends, if nobody does; then a
// synchronous call needs no other thread. Otherwise the background thread attends, which sleeps on
// the channel while there is nothing to do. It is started once, and not woken while others attend.
// Agreed batches are carried out in one order over all process sets, the same on all ranks, and a
// coordinator's decisions have left for all ranks before it carries them out itself.
//
// Note [Meetings]
// Where every rank has one core, on which it computes, a background thread would only take its time
// away; but a reduction that is put off until somebody waits for it finds the caches full of other
// things. So a rank that has submitted something large that was just made may *meet* the others: it
// attends for a short while, in which they come with the same, if they are as far; then all carry
// it out, and compute on. It spins, because a wake-up takes longer than they usually do. A rank
// that comes when the coordinator has left again does not wait for it: that would make the last one
// later still. Ranks count their meetings, so that they know which one that was; a wrong count
// costs time only.
//
// Note [Leaving]
// At a meeting a rank need not wait until the others have done their parts of a reduction, too: it
// goes on computing when its own is done, and looks after the others' before it carries out
// anything else, or when somebody waits or polls. How large the parts are: Note [Leads] in leads.h.
//
// Note [Failure]
// A mismatch fails one operation. Everything else that goes wrong (a rank died, a transfer failed,
// somebody aborted) is written into the channel once, with its cause, and fails everything pending
// and later on all ranks. A rank that shuts down says so first, and only what needs it fails.
// Operations on a device are done when they are queued there, and watched over after that: see Note
// [Batches on a device].
//
// Note [Inside a wait]
// A signal handler may run on a thread that waits, in the middle of a step if it attends, and call
// the engine. What it waits for would wait for itself: waits throw, and shutdown() and abort() only
// make everything fail, which the interrupted wait sees when the handler has returned. The same
// holds on a waiting thread that does not attend just then: which it does is a matter of timing.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/control_channel.h"
#include "core/function_ref.h"
#include "core/wait_trust.h"
#include "named/agreement.h"
#include "named/announced.h"
#include "named/batch_executor.h"
#include "named/fusion.h"
#include "named/gathering.h"
#include "named/leads.h"
#include "named/named_options.h"
#include "named/parts_trial.h"
#include "named/signature_cache.h"
#include "named/timeline.h"
#include "named/wire.h"

namespace horon {

// What to say of a handle that is unknown, or was waited for already.
std::string unknown_handle(std::uint64_t handle);

// Thread safety: all methods, from any thread.
// Where to look: named_engine.cc what callers use, named_engine_attend.cc who attends,
// named_engine_exchange.cc messages and decisions, named_engine_steps.cc what is carried out,
// named_engine_parts.cc what is made meanwhile.
class NamedEngine {
 public:
  // Called now and then by a wait that takes long; throws to abandon it.
  using InterruptCheck = const std::function<void()>*;
  // What ranks meet for: less is in the second-level caches, or too little to be worth the company.
  // More than a bucket of small gradients.
  static constexpr std::uint64_t kMeetForBytes = std::uint64_t{2} << 20;
  struct Parts {
    int rank = 0;
    int n_ranks = 1;
    std::unique_ptr<ControlChannel> channel;
    LaneFactory make_lane;
    BufferFactory make_buffer;
    bool has_spare_cores = true;               // one for the background thread of every rank
    bool may_meet = false;                     // see Note [Meetings]; the same on all ranks
    InterruptCheck check_interrupt = nullptr;  // while the engine is made
  };

  // Makes the lane of process set 0: blocks until all ranks have come.
  NamedEngine(Parts parts, const NamedOptions& options);
  // Shuts down.
  ~NamedEngine();
  NamedEngine(const NamedEngine&) = delete;
  NamedEngine& operator=(const NamedEngine&) = delete;

  // Returns a handle. With `will_wait` the caller promises to wait, so that no other thread need
  // wake up until then: it begins when somebody waits on this rank, or when others have waited for
  // it for half a second. Throws UsageError when a name is in flight already. Never blocks.
  std::uint64_t submit(const std::shared_ptr<NamedOperation>& operation, bool will_wait = false);
  // The same unless another thread is at the engine just now; then nullopt, and nothing happened.
  std::optional<std::uint64_t> try_submit(const std::shared_ptr<NamedOperation>& operation,
                                          bool will_wait = false);

  // Whether it is done, on a device as well. Throws UsageError for an unknown handle. Never blocks.
  bool poll(std::uint64_t handle);

  // Blocks until it is done (on a device: queued), removes the handle, and returns the operation,
  // whose error is set if it failed; null for an unknown handle. Throws what `check_interrupt`
  // throws.
  std::shared_ptr<NamedOperation> wait(std::uint64_t handle, InterruptCheck check_interrupt);
  // Waits a little for the other ranks to come with the same operation, if it is a large one, and
  // then carries it out; wait() has to follow. See Note [Meetings]. Throws what `check_interrupt`
  // throws.
  void meet(std::uint64_t handle, InterruptCheck check_interrupt);
  // Whether the tensor of an operation had better be made a part at a time: see Note [Trials]. Then
  // it is submitted with a maker, meet() has to follow, and the maker's finish(). Nullopt if that
  // is not worth thinking about: it is made first, and nobody need know how long that takes.
  std::optional<bool> wants_parts(const NamedRequest& request) const;
  // As wait(), for an operation that is done. Null, and nothing happened, if it is not or is
  // unknown, or if another thread is at the engine just now. Never blocks.
  std::shared_ptr<NamedOperation> try_wait(std::uint64_t handle);

  // Of operations that were not waited for.
  std::vector<std::uint64_t> handles() const;

  // Members of a process set, sorted. Throws UsageError when there is none.
  std::vector<int> process_set_ranks(int process_set) const;
  std::vector<int> process_sets() const;
  // A number for barriers and the like: ranks that call alike get alike.
  std::uint64_t next_number(const std::string& what);

  Timeline& timeline() { return timeline_; }
  bool is_running() const;

  // Carries out what is agreed, says goodbye and ends the thread; fails what is left. Takes a few
  // seconds at most. Idempotent. Inside a wait on the same thread (a signal handler): ends it for
  // all ranks, and has to be called again.
  void shutdown();
  // Fails everything, here and on all ranks.
  void abort(const std::string& reason);

 private:
  using Operation = std::shared_ptr<NamedOperation>;
  // How often somebody who waits looks for death, Ctrl-C and stalls.
  static constexpr std::chrono::milliseconds kLookAround{50};
  // How long a shutdown waits for what is agreed and not carried out.
  static constexpr std::chrono::milliseconds kGoodbyePatience{3000};
  static constexpr std::size_t kMostTrials = 4096;
  enum class Attendant : std::uint8_t { kNone, kForeground, kBackground };

  // A batch, or a change of the process sets.
  struct Step {
    std::vector<BatchTensor> batch;
    Decision change;
    Operation operation;  // that asked for the change
  };

  // A reduction whose own part is done.
  struct Left {
    BatchTensor tensor;
    BatchExecutor* executor;
  };

  // Requires the mutex; see submit().
  std::uint64_t enqueue(const Operation& operation, bool will_wait);
  // How to attend. Briefly: without sleeping, but whatever is agreed on is carried out.
  enum class Manner : std::uint8_t { kPatiently, kBriefly };
  // Attends until is_done() (called with the mutex), or sleeps while another thread does. False
  // when the deadline, if any, passed first. `look`, if any, is called now and then.
  using Look = FunctionRef<void()>;
  bool attend_until(FunctionRef<bool()> is_done, const Deadline* deadline,
                    InterruptCheck check_interrupt, Manner manner = Manner::kPatiently,
                    const Look* look = nullptr);
  void attend(FunctionRef<bool()> is_done, const Deadline* deadline, InterruptCheck check_interrupt,
              Manner manner, const Look* look);
  void begin_counting_meetings();
  Operation begin_meeting(std::uint64_t handle, std::uint32_t* meeting);
  void leave();
  void hand_on();
  // Whether this thread waits already, in a call that a signal handler has interrupted. Requires
  // the mutex.
  bool is_inside_wait() const {
    return std::ranges::find(waiters_, std::this_thread::get_id()) != waiters_.end();
  }
  // This thread waits no longer. Takes the mutex's lock, held or not, and releases it.
  void stop_waiting(std::unique_lock<std::mutex>& lock);
  void call_background();
  const GatherLimits& gather_limits(const NamedRequest& request) const;
  std::chrono::nanoseconds gather_time() const;
  void compare_settings(InterruptCheck check_interrupt);
  void background_loop();
  std::uint32_t attend_in_background();
  void abort_lanes(const std::string& reason);
  void end();

  // All below: the attendant's.
  // With `gathers` what was submitted just now is left for later.
  bool attend_once(InterruptCheck check_interrupt, bool gathers = false);
  bool exchange(bool gathers = false);
  void wait_for_devices();
  bool announce_queued(bool gathers);
  bool take_messages();
  void take_announcements(int source, const std::vector<Announcement>& announcements);
  bool deliver_decisions();
  std::vector<const Decision*> send_to_each(const std::vector<Decision>& decisions);
  void apply(const std::vector<const Decision*>& decisions);
  void plan(std::vector<BatchTensor>* agreed);
  bool is_in_foreground() const;
  void run_step(InterruptCheck check_interrupt);
  void flush_all();
  void run_batch(const std::vector<BatchTensor>& batch, InterruptCheck check_interrupt);
  // Whether ranks tell each other how they make the tensor: the same on all of them.
  bool may_be_in_parts(const NamedRequest& request) const;
  // Waits for what other threads make, and makes what this one does, unless that is for parts.
  static void await_made(const std::vector<BatchTensor>& batch, bool in_parts,
                         const WaitContext& context);
  // Whether some rank makes it a part at a time, so that all reduce it so.
  bool exchange_parts(const BatchTensor& tensor, BatchExecutor& executor,
                      const WaitContext& context);
  void note_making(const BatchTensor& tensor, bool in_parts);
  // True if it was left to the others to be ended.
  bool run_and_leave(const std::vector<BatchTensor>& batch, int root, BatchExecutor& executor,
                     const WaitContext& context);
  // Whether something was left, and has ended.
  bool has_left_ended() const {
    return left_ && left_->executor->lane().transport().has_left_ended();
  }
  // Ends what was left, waiting for it; false if nothing was. Throws what `check_interrupt` throws.
  bool end_left(InterruptCheck check_interrupt);
  // Calls `act`, whose errors fail everything; what() says of what. Throws what `check_interrupt`
  // throws.
  template <typename What, typename Act>
  void run_guarded(const What& what, bool is_on_device, InterruptCheck check_interrupt,
                   const Act& act);
  // This rank has waited for the others until now.
  void note_wait();
  // Throws GroupError where a rank has died or ended it for all, and what `check_interrupt` throws.
  void check_ranks(InterruptCheck check_interrupt) const;
  void change_sets(const Step& step);
  void add_set(int id, const std::vector<int>& ranks);
  void remove_set(int id);
  void shut_down(ProcessSetLane& lane);
  void look_around();
  std::size_t look_at_devices();
  bool may_poke() const;
  void report_stalls();
  std::string with_channel_failure(const std::string& reason) const;
  void fail_all(const std::string& reason);
  void fail_everything(const std::string& reason);
  std::exception_ptr failure_of(const NamedOperation& operation) const;
  void finish(const Operation& operation, std::exception_ptr error = nullptr);
  void publish_finished();
  void look_at_left();
  bool has_work() const { return !steps_.empty() || !is_flushed_; }

  const int rank_;
  const int n_ranks_;
  const NamedOptions options_;
  const std::unique_ptr<ControlChannel> channel_;
  const LaneFactory make_lane_;
  const BufferFactory make_buffer_;
  const bool has_spare_cores_;
  const bool may_meet_;
  Timeline timeline_;

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::condition_variable changed_;  // for waiters: something is done, or nobody attends
  std::vector<Operation> queue_;
  bool is_queue_told_ = false;  // somebody who attends will look at the queue
  Gathering gathering_;         // of what is in the queue
  std::pmr::unsynchronized_pool_resource
      nodes_;  // of the maps below: most come and go at every step
  std::pmr::unordered_set<const NamedKey*, NamedKeyHash, NamedKeyEqual> in_flight_{
      &nodes_};                   // the operations' own
  std::size_t n_unpromised_ = 0;  // of those in flight, without will_wait
  std::pmr::unordered_map<std::uint64_t, Operation> operations_{&nodes_};
  std::uint64_t next_handle_ = 1;
  std::map<std::string, std::uint64_t> numbers_;
  std::map<int, std::vector<int>> sets_;
  std::map<int, std::shared_ptr<ProcessSetLane>> lanes_;  // of sets that this rank is in
  Attendant attendant_ = Attendant::kNone;
  std::vector<std::thread::id> waiters_;  // each thread once
  std::uint32_t n_meetings_ = 0;
  WaitTrust meeting_trust_;
  std::unordered_map<const NamedRequest*, PartsTrial> parts_trials_;
  bool has_left_ = false;              // see Note [Leaving]
  bool has_device_work_ = false;       // something may be under way on a device
  bool is_background_called_ = false;  // woken, and not come yet
  bool sleeps_until_called_ = false;   // the background thread, without a limit
  bool is_shutting_down_ = false;      // takes nothing more
  bool is_ending_ = false;             // nobody attends any more
  bool is_shut_down_ = false;
  bool stop_thread_ = false;
  bool wants_goodbye_ = false;
  bool has_goodbye_ = false;
  std::string failure_;  // not empty: why nothing goes on

  // The attendant's:
  std::unique_ptr<Agreement> agreement_;  // on rank 0
  SignatureCache cache_;
  Announced announced_;
  std::deque<Step> steps_;  // agreed
  std::map<int, std::unique_ptr<BatchExecutor>> executors_;
  std::vector<Operation> finished_;  // to be published
  std::optional<Left> left_;         // see Note [Leaving]
  Leads leads_;
  bool is_meeting_ = false;
  Clock::time_point free_since_;  // since when this rank has only waited, if it attends and has
  bool has_said_goodbye_ = false;
  bool is_flushed_ = true;
  bool is_failed_ = false;
  Clock::time_point last_look_;
  Clock::time_point last_report_;
  Clock::time_point last_poke_;
  Clock::time_point waiting_since_;  // the oldest announcement that has no decision

  std::mutex shutdown_mutex_;
  std::thread background_;
};

}  // namespace horon
