#include "named/named_engine.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/thread_name.h"
#include "watch/long_wait.h"

namespace horon {
namespace {

const std::string& shut_down_text() {
  static const std::string text =
      "Horovod has been shut down: this rank called shutdown() before it was finished.";
  return text;
}

// For its way through the engine.
void prepare(NamedOperation& operation) {
  const NamedRequest& request = *operation.request;
  if (request.keys.empty()) {
    operation.own_keys = keys_of(request);
  }
  operation.unfinished_tensors = request.tensors.size();
}

}  // namespace

std::string unknown_handle(std::uint64_t handle) {
  return concat("Handle ", handle, " was not created or has been cleared.");
}

NamedEngine::NamedEngine(Parts parts, const NamedOptions& options)
    : rank_(parts.rank),
      n_ranks_(parts.n_ranks),
      options_(options),
      channel_(std::move(parts.channel)),
      make_lane_(std::move(parts.make_lane)),
      make_buffer_(std::move(parts.make_buffer)),
      has_spare_cores_(parts.has_spare_cores),
      may_meet_(parts.may_meet),
      last_look_(Clock::now()),
      last_report_(Clock::now()),
      last_poke_(Clock::now()),
      waiting_since_(Clock::now()) {
  std::vector<int> world(static_cast<std::size_t>(n_ranks_));
  std::iota(world.begin(), world.end(), 0);
  if (rank_ == 0) {
    agreement_ = std::make_unique<Agreement>(n_ranks_, options_.join_everything);
  }
  add_set(0, world);
  compare_settings(parts.check_interrupt);
  channel_->leave_to_background(true);
  background_ = start_thread([this] { background_loop(); });
}

NamedEngine::~NamedEngine() { shutdown(); }

// What decides about batches has to be the same everywhere.
void NamedEngine::compare_settings(InterruptCheck check_interrupt) {
  const std::vector<std::int64_t> own = {
      static_cast<std::int64_t>(options_.fusion.threshold_bytes),
      static_cast<std::int64_t>(options_.fusion.alone_bytes),
      static_cast<std::int64_t>(options_.fusion.gpu_alone_bytes)};
  const WaitContext context{Deadline::after(options_.timeout), check_interrupt};
  const std::vector<std::int64_t> all = executors_.at(0)->gather_numbers(own, context);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i] != all[i % own.size()]) {
      throw UsageError(concat("HORON_FUSION_THRESHOLD must be the same on all ranks: rank 0 has ",
                              all[0], " bytes, rank ", i / own.size(), " has ",
                              all[i / own.size() * own.size()], '.'));
    }
  }
}

std::uint64_t NamedEngine::submit(const Operation& operation, bool will_wait) {
  prepare(*operation);
  const std::lock_guard lock(mutex_);
  return enqueue(operation, will_wait);
}

std::optional<std::uint64_t> NamedEngine::try_submit(const Operation& operation, bool will_wait) {
  prepare(*operation);
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock ? std::optional(enqueue(operation, will_wait)) : std::nullopt;
}

std::uint64_t NamedEngine::enqueue(const Operation& operation, bool will_wait) {
  const NamedRequest& request = *operation->request;
  const std::vector<NamedKey>& keys = operation->keys();
  const std::uint64_t handle = next_handle_++;
  operation->handle = handle;
  if (is_shutting_down_ || !failure_.empty()) {
    const std::string& why = failure_.empty() ? shut_down_text() : failure_;
    operation->error = std::make_exception_ptr(GroupError(concat(describe(request), ": ", why)));
    operation->is_done = true;
    operations_[handle] = operation;
    return handle;
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!in_flight_.insert(&keys[i]).second) {
      for (std::size_t j = 0; j < i; ++j) {
        in_flight_.erase(&keys[j]);
      }
      throw UsageError(concat(
          "Requested to ", name(request.kind), " a tensor with the same name as another tensor ",
          "that is currently being processed: '", request.tensors[i].name,
          "'. If you want to request another tensor, use a different tensor name."));
    }
  }
  operation->is_promised = will_wait;
  n_unpromised_ += will_wait ? 0 : 1;
  operations_[handle] = operation;
  queue_.push_back(operation);
  if (will_wait && attendant_ != Attendant::kForeground) {
    return handle;
  }
  const GatherLimits& limits = gather_limits(request);
  const bool must_tell = !is_queue_told_;
  if (must_tell) {
    is_queue_told_ = true;
    gathering_.begin(limits, Clock::now());
  }
  std::uint64_t bytes = 0;
  for (const NamedOperation::Tensor& tensor : operation->tensors) {
    bytes += tensor.input.bytes;
  }
  const bool has_enough = gathering_.add(limits, bytes);
  if (must_tell || has_enough) {
    if (attendant_ != Attendant::kNone) {
      channel_->wake();
    } else if (waiters_.empty()) {
      call_background();
    }
  }
  return handle;
}

const GatherLimits& NamedEngine::gather_limits(const NamedRequest& request) const {
  if (request.device == DeviceKind::kCuda) {
    return kGatherOnDevice;
  }
  const bool is_in_turn = !has_spare_cores_ && request.device == DeviceKind::kCpu;
  return is_in_turn ? kGatherInTurn : kGather;
}

// Requires the mutex. How long the queue may still be left alone.
std::chrono::nanoseconds NamedEngine::gather_time() const {
  return queue_.empty() || !waiters_.empty() ? std::chrono::nanoseconds(0)
                                             : gathering_.left(Clock::now());
}

void NamedEngine::call_background() {
  if (!is_background_called_) {
    is_background_called_ = true;
    channel_->wake();
  }
}

bool NamedEngine::poll(std::uint64_t handle) {
  look_at_left();
  Operation operation;
  {
    const std::lock_guard lock(mutex_);
    const auto found = operations_.find(handle);
    if (found == operations_.end()) {
      throw UsageError(unknown_handle(handle));
    }
    const NamedOperation& known = *found->second;
    if (!known.is_done || known.request->device != DeviceKind::kCuda || known.error) {
      return known.is_done;
    }
    operation = found->second;
  }
  return operation->has_come();
}

std::vector<std::uint64_t> NamedEngine::handles() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> handles;
  handles.reserve(operations_.size());
  for (const auto& [handle, operation] : operations_) {
    handles.push_back(handle);
  }
  return handles;
}

std::shared_ptr<NamedOperation> NamedEngine::wait(std::uint64_t handle,
                                                  InterruptCheck check_interrupt) {
  Operation operation;
  {
    const std::lock_guard lock(mutex_);
    const auto found = operations_.find(handle);
    if (found == operations_.end()) {
      return nullptr;
    }
    operation = found->second;
    if (operation->is_done) {
      operations_.erase(found);
      return operation;
    }
  }
  LongWait long_wait;
  const auto look_at_wait = [&] {
    // Rank 0 reports what stalls, and who is missing: see stall.h.
    long_wait.look(Deadline::after(options_.timeout), [&](bool) {
      return Waiting{
          concat(name(operation->request->kind), " '", operation->request->name(), "'"), {}, false};
    });
  };
  const Look look(look_at_wait);
  attend_until([&] { return operation->is_done; }, nullptr, check_interrupt, Manner::kPatiently,
               &look);
  const std::lock_guard lock(mutex_);
  operations_.erase(handle);
  return operation;
}

NamedEngine::Operation NamedEngine::try_wait(std::uint64_t handle) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    return nullptr;
  }
  const auto found = operations_.find(handle);
  if (found == operations_.end() || !found->second->is_done) {
    return nullptr;
  }
  Operation operation = std::move(found->second);
  operations_.erase(found);
  return operation;
}

std::vector<int> NamedEngine::process_set_ranks(int process_set) const {
  const std::lock_guard lock(mutex_);
  const auto found = sets_.find(process_set);
  if (found == sets_.end()) {
    throw UsageError(concat("process set ", process_set, " does not exist."));
  }
  return found->second;
}

std::vector<int> NamedEngine::process_sets() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ids;
  ids.reserve(sets_.size());
  for (const auto& [id, ranks] : sets_) {
    ids.push_back(id);
  }
  return ids;
}

std::uint64_t NamedEngine::next_number(const std::string& what) {
  const std::lock_guard lock(mutex_);
  return numbers_[what]++;
}

bool NamedEngine::is_running() const {
  const std::lock_guard lock(mutex_);
  return !is_shutting_down_ && failure_.empty();
}

void NamedEngine::abort(const std::string& reason) {
  channel_->poison(concat("rank ", rank_, " aborted: ", reason));
  abort_lanes(reason);
  channel_->wake();
  {
    const std::lock_guard lock(mutex_);
    if (is_inside_wait()) {
      return;  // see Note [Inside a wait]
    }
  }
  // Whoever attends fails everything; here it is waited for.
  const Deadline deadline = Deadline::after(kGoodbyePatience);
  attend_until([&] { return !failure_.empty() || is_shut_down_; }, &deadline, nullptr);
}

void NamedEngine::shutdown() {
  const std::lock_guard one_at_a_time(shutdown_mutex_);
  bool is_inside = false;
  {
    const std::lock_guard lock(mutex_);
    if (is_shut_down_) {
      return;
    }
    is_shutting_down_ = true;
    wants_goodbye_ = true;
    is_inside = is_inside_wait();
  }
  if (is_inside) {
    const std::string reason =
        "it was shut down by a signal handler, in the middle of an operation";
    channel_->poison(concat("rank ", rank_, ": ", reason));
    abort_lanes(reason);
    return;
  }
  channel_->wake();
  const Deadline deadline = Deadline::after(kGoodbyePatience);
  const bool said =
      attend_until([&] { return has_goodbye_ || !failure_.empty(); }, &deadline, nullptr);
  if (!said) {
    // Somebody keeps this rank from leaving: a transfer that does not end. It ends now.
    channel_->poison(concat("rank ", rank_, " shut down while others kept it waiting"));
    abort_lanes("it was shut down");
  }
  {
    const std::lock_guard lock(mutex_);
    stop_thread_ = true;
    is_ending_ = true;
    changed_.notify_all();
  }
  channel_->wake();
  background_.join();
  end();
}

// The last thing: nothing attends any more, but callers that were in wait() may.
void NamedEngine::end() {
  attend_until([&] { return attendant_ == Attendant::kNone; }, nullptr, nullptr);
  {
    const std::lock_guard lock(mutex_);
    attendant_ = Attendant::kForeground;  // and stays so
    is_shut_down_ = true;
  }
  fail_everything(shut_down_text());
  for (auto& [id, executor] : executors_) {
    shut_down(executor->lane());
  }
  {
    const std::lock_guard lock(mutex_);
    lanes_.clear();
  }
  executors_.clear();
  channel_->depart();
  timeline_.stop();
}

void NamedEngine::shut_down(ProcessSetLane& lane) {
  DeviceBatches* const device = lane.device_batches();
  if (device != nullptr && !device->shutdown()) {
    channel_->poison(
        concat("rank ", rank_, " shut down before its GPU had come to the end of what was queued"));
  }
  lane.shutdown();
}

void NamedEngine::abort_lanes(const std::string& reason) {
  std::map<int, std::shared_ptr<ProcessSetLane>> lanes;
  {
    const std::lock_guard lock(mutex_);
    lanes = lanes_;
  }
  for (const auto& [id, lane] : lanes) {
    lane->abort(reason);
  }
}

}  // namespace horon
