// NamedEngine: what was agreed on, in the order in which it is carried out, and how operations end.

#include <algorithm>

#include "core/error.h"
#include "named/named_engine.h"

namespace horon {

using Sleeper = ControlChannel::Sleeper;

namespace {

std::string describe(const Decision& change) {
  return concat(change.type == Decision::Type::kSetAdded ? "making" : "removing", " process set ",
                change.value);
}

}  // namespace

void NamedEngine::apply(const std::vector<const Decision*>& decisions) {
  using Type = Decision::Type;
  std::vector<BatchTensor> agreed;
  agreed.reserve(decisions.size());
  waiting_since_ = Clock::now();
  for (const Decision* const one : decisions) {
    const Decision& decision = *one;
    switch (decision.type) {
      case Type::kRun:
      case Type::kRunKnown: {
        if (decision.type == Type::kRun && decision.id != kNoId) {
          cache_.define(decision.id, decision.request);
        }
        const RequestPtr& request =
            decision.type == Type::kRun ? decision.request : cache_.request(decision.id);
        Operation operation =
            decision.type == Type::kRunKnown ? announced_.take(decision.id) : nullptr;
        if (!operation) {
          operation = announced_.take(key_of(*request));
        }
        if (operation) {
          timeline_.agreed(*request);
        }
        if (request->kind == NamedKind::kBarrier) {
          if (operation) {
            finish(operation);
          }
          break;
        }
        // The request that is here is the same as the agreed one, but has been looked at lately.
        const RequestPtr& used = operation ? operation->request : request;
        for (std::size_t tensor = 0; tensor < used->tensors.size(); ++tensor) {
          agreed.push_back({used, tensor, operation});
        }
        break;
      }
      case Type::kFail:
        if (const Operation operation =
                announced_.take(key_of(decision.process_set, decision.name))) {
          timeline_.agreed(*operation->request);
          finish(operation, decision.is_usage_error
                                ? std::make_exception_ptr(UsageError(decision.text))
                                : std::make_exception_ptr(MismatchError(decision.text)));
        }
        break;
      case Type::kJoined:
        begin_counting_meetings();  // a rank that has joined has held none
        if (const Operation operation = announced_.take(key_of(0, kJoinName))) {
          operation->value = decision.value;
          finish(operation);
        }
        break;
      case Type::kSetAdded:
      case Type::kSetRemoved:
      case Type::kGoodbye: {
        plan(&agreed);
        Step step;
        step.change = decision;
        if (decision.request) {
          step.operation = announced_.take(key_of(*decision.request));
        }
        steps_.push_back(std::move(step));
        break;
      }
    }
  }
  plan(&agreed);
}

// Appends what was agreed on to the steps.
void NamedEngine::plan(std::vector<BatchTensor>* agreed) {
  if (agreed->empty()) {
    return;
  }
  timeline_.mark_cycle();
  std::vector<FusionItem> items;
  items.reserve(agreed->size());
  for (const BatchTensor& tensor : *agreed) {
    items.push_back({tensor.request.get(), tensor.tensor});
  }
  for (const Batch& batch : plan_fusion(items, options_.fusion)) {
    Step step;
    for (const std::size_t index : batch) {
      step.batch.push_back(std::move((*agreed)[index]));
    }
    steps_.push_back(std::move(step));
  }
  agreed->clear();
}

bool NamedEngine::is_in_foreground() const {
  const std::lock_guard lock(mutex_);
  return attendant_ == Attendant::kForeground;
}

void NamedEngine::run_step(InterruptCheck check_interrupt) {
  // Whoever takes part in this has to have been told before this rank waits for it.
  flush_all();
  if (is_failed_) {
    return;
  }
  end_left(check_interrupt);
  note_wait();
  if (is_failed_) {
    return;
  }
  const Step& step = steps_.front();
  const bool is_change = step.batch.empty();
  const auto what = [&] {
    return is_change ? describe(step.change) : describe(*step.batch.front().request);
  };
  run_guarded(what, !is_change && is_gpu(step.batch.front().request->device), check_interrupt,
              [&] { is_change ? change_sets(step) : run_batch(step.batch, check_interrupt); });
  if (!steps_.empty()) {
    steps_.pop_front();
  }
}

template <typename What, typename Act>
void NamedEngine::run_guarded(const What& what, bool is_on_device, InterruptCheck check_interrupt,
                              const Act& act) {
  try {
    act();
  } catch (const Error& error) {
    const std::string reason = concat("rank ", rank_, ": ", what(), ": ", error.what());
    const bool is_lost = dynamic_cast<const PeerLostError*>(&error) != nullptr;
    fail_all(is_on_device && is_lost ? with_channel_failure(reason) : reason);
  } catch (const std::exception& error) {
    // What a signal handler raised, where there is one; else what broke the batch.
    fail_all(concat("rank ", rank_, " gave up ", what(), ": ", error.what()));
    if (check_interrupt != nullptr) {
      publish_finished();
      throw;
    }
  }
}

bool NamedEngine::end_left(InterruptCheck check_interrupt) {
  if (!left_) {
    return false;
  }
  bool is_shutting_down = false;
  {
    const std::lock_guard lock(mutex_);
    is_shutting_down = is_shutting_down_;
  }
  const auto patience =
      is_shutting_down ? std::min(kGoodbyePatience, options_.timeout) : options_.timeout;
  const auto what = [&] { return describe(*left_->tensor.request); };
  run_guarded(what, false, check_interrupt, [&] {
    left_->executor->lane().transport().await_left(
        {Deadline::after(patience), check_interrupt, is_in_foreground()});
    finish(left_->tensor.operation);
    left_.reset();
  });
  {
    const std::lock_guard lock(mutex_);
    has_left_ = false;
  }
  publish_finished();
  return true;
}

void NamedEngine::note_wait() {
  if (leads_.is_looking() && is_in_foreground()) {
    leads_.waited(Clock::now() - free_since_);
  }
}

void NamedEngine::flush_all() {
  while (!channel_->flush()) {
    const std::uint32_t seen = channel_->events();
    if (channel_->flush() || channel_->spin(seen)) {
      continue;
    }
    channel_->sleep(Sleeper::kForeground, seen, kLookAround);
    look_around();
    if (is_failed_) {
      return;
    }
  }
  is_flushed_ = true;
}

void NamedEngine::run_batch(const std::vector<BatchTensor>& batch, InterruptCheck check_interrupt) {
  const NamedRequest& request = *batch.front().request;
  const auto found = executors_.find(request.process_set);
  HORON_CHECK(found != executors_.end(), "process set ", request.process_set, " has no lane");
  int root = 0;
  if (request.kind == NamedKind::kBroadcast) {
    const std::vector<int> ranks = process_set_ranks(request.process_set);
    root = static_cast<int>(std::find(ranks.begin(), ranks.end(), request.root) - ranks.begin());
  }
  if (timeline_.is_on()) {
    for (const BatchTensor& tensor : batch) {
      timeline_.begin(*tensor.request, tensor.tensor);
    }
  }
  std::exception_ptr error;
  try {
    WaitContext context{Deadline::after(options_.timeout), check_interrupt, is_in_foreground()};
    // What waits for the ranks' devices to meet knows nothing of the ranks.
    const std::function<void()> check_ranks = [&] { this->check_ranks(check_interrupt); };
    if (request.device == DeviceKind::kCuda) {
      context.check_interrupt = &check_ranks;
    }
    if (run_and_leave(batch, root, *found->second, context)) {
      return;
    }
  } catch (const MismatchError& mismatch) {
    error =
        std::make_exception_ptr(MismatchError(concat(describe(request), ": ", mismatch.what())));
  }
  if (request.device == DeviceKind::kCuda) {
    const std::lock_guard lock(mutex_);
    has_device_work_ = true;
  }
  if (timeline_.is_on()) {
    for (const BatchTensor& tensor : batch) {
      timeline_.end(*tensor.request, tensor.tensor);
    }
  }
  for (const BatchTensor& tensor : batch) {
    if (tensor.operation && (error || --tensor.operation->unfinished_tensors == 0)) {
      finish(tensor.operation, error);
    }
  }
}

bool NamedEngine::run_and_leave(const std::vector<BatchTensor>& batch, int root,
                                BatchExecutor& executor, const WaitContext& context) {
  const BatchTensor& tensor = batch.front();
  const NamedRequest* const request = tensor.request.get();
  const bool may_be_parts = batch.size() == 1 && may_be_in_parts(*request);
  await_made(batch, may_be_parts, context);
  if (may_be_parts && exchange_parts(tensor, executor, context)) {
    executor.run_in_parts(tensor, context);
    note_making(tensor, true);
    free_since_ = Clock::now();
    return false;
  }
  const bool may_leave = is_meeting_ && executor.may_leave(batch) &&
                         tensor.spec().bytes() >= kMeetForBytes && !timeline_.is_on() &&
                         tensor.operation->is_promised && request->tensors.size() == 1;
  if (!may_leave) {
    executor.run(batch, root, context);
    return false;
  }
  const Transport::Leaving leaving = executor.run_and_leave(tensor, leads_.of(request), context);
  leads_.ran(request, tensor.spec().bytes(), leaving.common_lead_bytes);
  note_making(tensor, false);
  free_since_ = Clock::now();
  if (!leaving.is_left) {
    return false;
  }
  left_ = Left{tensor, &executor};
  const std::lock_guard lock(mutex_);
  tensor.operation->is_left = true;
  has_left_ = true;
  return true;
}

void NamedEngine::check_ranks(InterruptCheck check_interrupt) const {
  if (const std::string failure = channel_->failure(); !failure.empty()) {
    throw GroupError(failure);
  }
  if (check_interrupt != nullptr) {
    (*check_interrupt)();
  }
}

void NamedEngine::change_sets(const Step& step) {
  const Decision& change = step.change;
  switch (change.type) {
    case Decision::Type::kSetAdded:
      add_set(change.value, {change.request->ranks.begin(), change.request->ranks.end()});
      break;
    case Decision::Type::kSetRemoved:
      remove_set(change.value);
      break;
    default: {
      const std::lock_guard lock(mutex_);
      has_goodbye_ = true;
      changed_.notify_all();
    }
  }
  if (step.operation) {
    step.operation->value = change.value;
    finish(step.operation);
  }
}

void NamedEngine::add_set(int id, const std::vector<int>& ranks) {
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  std::shared_ptr<ProcessSetLane> lane;
  if (place != ranks.end()) {
    lane = make_lane_(id, ranks, [this] { check_ranks(nullptr); });
    executors_[id] = std::make_unique<BatchExecutor>(lane, static_cast<int>(place - ranks.begin()),
                                                     static_cast<int>(ranks.size()), make_buffer_);
  }
  const std::lock_guard lock(mutex_);
  sets_[id] = ranks;
  if (lane) {
    lanes_[id] = lane;
  }
}

void NamedEngine::remove_set(int id) {
  {
    const std::lock_guard lock(mutex_);
    sets_.erase(id);
    lanes_.erase(id);
  }
  cache_.forget(id);
  const auto found = executors_.find(id);
  if (found != executors_.end()) {
    shut_down(found->second->lane());
    executors_.erase(found);
  }
}

std::exception_ptr NamedEngine::failure_of(const NamedOperation& operation) const {
  std::string reason;
  {
    const std::lock_guard lock(mutex_);
    reason = failure_;
  }
  return std::make_exception_ptr(GroupError(concat(describe(*operation.request), ": ", reason)));
}

// Ends it for all ranks.
void NamedEngine::fail_all(const std::string& reason) {
  if (is_failed_) {
    return;
  }
  channel_->poison(reason);
  fail_everything(channel_->is_poisoned() ? channel_->failure() : reason);
  abort_lanes(reason);
}

// Here only.
void NamedEngine::fail_everything(const std::string& reason) {
  is_failed_ = true;
  std::vector<Operation> queued;
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) {
      failure_ = reason;
    }
    queued.swap(queue_);
    is_queue_told_ = false;
    gathering_ = {};
    has_device_work_ = false;  // it is aborted
    has_left_ = false;
    changed_.notify_all();
  }
  for (const Operation& operation : queued) {
    finish(operation, failure_of(*operation));
  }
  for (const Operation& operation : announced_.take_all()) {
    finish(operation, failure_of(*operation));
  }
  for (const Step& step : steps_) {
    if (step.operation) {
      finish(step.operation, failure_of(*step.operation));
    }
    for (const BatchTensor& tensor : step.batch) {
      if (tensor.operation) {
        finish(tensor.operation, failure_of(*tensor.operation));
      }
    }
  }
  steps_.clear();
  if (left_) {
    const Operation& operation = left_->tensor.operation;
    const bool has_ended = has_left_ended();  // and nobody has looked since
    left_->executor->lane().transport().let_go_left();
    finish(operation, has_ended ? nullptr : failure_of(*operation));
    left_.reset();
  }
  publish_finished();
}

void NamedEngine::finish(const Operation& operation, std::exception_ptr error) {
  if (!operation->is_finished) {
    operation->is_finished = true;
    operation->error = std::move(error);
    finished_.push_back(operation);
  }
}

void NamedEngine::publish_finished() {
  if (finished_.empty()) {
    return;
  }
  const std::lock_guard lock(mutex_);
  for (const Operation& operation : finished_) {
    operation->is_done = true;
    n_unpromised_ -= operation->is_promised ? 0 : 1;
    for (const NamedKey& key : operation->keys()) {
      in_flight_.erase(&key);
    }
  }
  finished_.clear();
  if (!waiters_.empty()) {
    changed_.notify_all();
  }
}

}  // namespace horon
