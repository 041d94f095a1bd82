#include "named/named_engine.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/log.h"
#include "core/thread_name.h"

namespace horon {
namespace {

using Sleeper = ControlChannel::Sleeper;

// How often somebody who waits looks for death, Ctrl-C and stalls.
constexpr std::chrono::milliseconds kLookAround{50};
// The background thread with nothing to wait for.
constexpr std::chrono::hours kForever{24};
// How long a shutdown waits for what is agreed and not carried out.
constexpr std::chrono::seconds kGoodbyePatience{3};
// After this time without an answer, the coordinator is woken to watch over what is announced.
constexpr std::chrono::milliseconds kPokeAfter{500};

const std::string& shut_down_text() {
  static const std::string text =
      "Horovod has been shut down: this rank called shutdown() before it was finished.";
  return text;
}

std::string describe(const NamedRequest& request) {
  std::string text = concat(name(request.kind), " '", request.name(), "'");
  if (request.tensors.size() > 1) {
    text += concat(" and ", request.tensors.size() - 1, " more");
  }
  return text;
}

std::string describe(const Decision& change) {
  return concat(change.type == Decision::Type::kSetAdded ? "making" : "removing", " process set ",
                change.value);
}

}  // namespace

NamedEngine::NamedEngine(Parts parts, const NamedOptions& options)
    : rank_(parts.rank),
      n_ranks_(parts.n_ranks),
      options_(options),
      channel_(std::move(parts.channel)),
      make_lane_(std::move(parts.make_lane)),
      make_buffer_(std::move(parts.make_buffer)),
      last_look_(Clock::now()),
      last_report_(Clock::now()),
      waiting_since_(Clock::now()) {
  std::vector<int> world(static_cast<std::size_t>(n_ranks_));
  std::iota(world.begin(), world.end(), 0);
  if (rank_ == 0) {
    agreement_ = std::make_unique<Agreement>(n_ranks_);
  }
  add_set(0, world);
  compare_settings();
  channel_->leave_to_background(true);
  background_ = std::thread([this] { background_loop(); });
}

NamedEngine::~NamedEngine() { shutdown(); }

// What decides about batches has to be the same everywhere.
void NamedEngine::compare_settings() {
  const std::vector<std::int64_t> own = {static_cast<std::int64_t>(options_.fusion.threshold_bytes),
                                         static_cast<std::int64_t>(options_.fusion.alone_bytes)};
  const WaitContext context{Deadline::after(options_.timeout), nullptr};
  const std::vector<std::int64_t> all = executors_.at(0)->gather_numbers(own, context);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i] != all[i % own.size()]) {
      throw UsageError(concat("HORON_FUSION_THRESHOLD must be the same on all ranks: rank 0 has ",
                              all[0], " bytes, rank ", i / own.size(), " has ",
                              all[i / own.size() * own.size()], '.'));
    }
  }
}

// ---- From any thread ------------------------------------------------------------------------

std::uint64_t NamedEngine::submit(const Operation& operation, bool will_wait) {
  const NamedRequest& request = *operation->request;
  std::vector<std::string> keys;
  keys.reserve(request.tensors.size());
  for (const TensorSpec& tensor : request.tensors) {
    keys.push_back(key_of(request.process_set, tensor.name));
  }
  operation->unfinished_tensors = request.tensors.size();
  const std::lock_guard lock(mutex_);
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
    if (!in_flight_.insert(keys[i]).second) {
      for (std::size_t j = 0; j < i; ++j) {
        in_flight_.erase(keys[j]);
      }
      throw UsageError(concat(
          "Requested to ", name(request.kind), " a tensor with the same name as another tensor ",
          "that is currently being processed: '", request.tensors[i].name,
          "'. If you want to request another tensor, use a different tensor name."));
    }
  }
  operations_[handle] = operation;
  queue_.push_back(operation);
  if (attendant_ != Attendant::kNone) {
    if (!will_wait) {
      channel_->wake();
    }
  } else if (n_waiters_ == 0 && !will_wait) {
    call_background();
  }
  return handle;
}

void NamedEngine::call_background() {
  if (!is_background_called_) {
    is_background_called_ = true;
    channel_->wake();
  }
}

bool NamedEngine::poll(std::uint64_t handle) const {
  const std::lock_guard lock(mutex_);
  const auto found = operations_.find(handle);
  if (found == operations_.end()) {
    throw UsageError(concat("handle ", handle, " is unknown, or was waited for already."));
  }
  return found->second->is_done;
}

std::shared_ptr<NamedOperation> NamedEngine::wait(std::uint64_t handle,
                                                  InterruptCheck check_interrupt) {
  Operation operation;
  {
    const std::lock_guard lock(mutex_);
    const auto found = operations_.find(handle);
    if (found == operations_.end()) {
      throw UsageError(concat("handle ", handle, " is unknown, or was waited for already."));
    }
    operation = found->second;
  }
  attend_until([&] { return operation->is_done; }, nullptr, check_interrupt);
  const std::lock_guard lock(mutex_);
  operations_.erase(handle);
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
  // Whoever attends fails everything; here it is waited for.
  const Deadline deadline = Deadline::after(kGoodbyePatience);
  attend_until([&] { return !failure_.empty() || is_shut_down_; }, &deadline, nullptr);
}

void NamedEngine::shutdown() {
  const std::lock_guard one_at_a_time(shutdown_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (is_shut_down_) {
      return;
    }
    is_shutting_down_ = true;
    wants_goodbye_ = true;
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
    executor->lane().shutdown();
  }
  {
    const std::lock_guard lock(mutex_);
    lanes_.clear();
  }
  executors_.clear();
  channel_->depart();
  timeline_.stop();
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

// ---- Who attends ----------------------------------------------------------------------------

bool NamedEngine::attend_until(FunctionRef<bool()> is_done, const Deadline* deadline,
                               InterruptCheck check_interrupt) {
  std::unique_lock lock(mutex_);
  if (is_done()) {
    return true;
  }
  const auto is_late = [&] { return deadline != nullptr && deadline->has_passed(); };
  ++n_waiters_;
  while (!is_done() && !is_late()) {
    if (attendant_ == Attendant::kNone && !is_ending_) {
      attendant_ = Attendant::kForeground;
      lock.unlock();
      try {
        attend(is_done, deadline, check_interrupt);
      } catch (...) {
        leave();
        lock.lock();
        --n_waiters_;
        lock.unlock();
        hand_on();
        throw;
      }
      leave();
      lock.lock();
      continue;
    }
    if (attendant_ == Attendant::kBackground) {
      channel_->wake();  // it may only be spinning
    }
    changed_.wait_for(lock, kLookAround);
    if (check_interrupt != nullptr && !is_done()) {
      lock.unlock();
      try {
        (*check_interrupt)();
      } catch (...) {
        lock.lock();
        --n_waiters_;
        throw;
      }
      lock.lock();
    }
  }
  --n_waiters_;
  const bool result = is_done();
  lock.unlock();
  hand_on();
  return result;
}

// On the thread that is the attendant, in the foreground.
void NamedEngine::attend(FunctionRef<bool()> is_done, const Deadline* deadline,
                         InterruptCheck check_interrupt) {
  channel_->attend();
  while (true) {
    const std::uint32_t seen = channel_->events();
    const bool did_something = attend_once(check_interrupt);
    {
      const std::lock_guard lock(mutex_);
      if (is_done() || is_ending_) {
        return;
      }
    }
    if (did_something || channel_->spin(seen)) {
      continue;
    }
    if (deadline != nullptr && deadline->has_passed()) {
      return;
    }
    channel_->sleep(Sleeper::kForeground, seen, kLookAround);
    look_around();
    if (check_interrupt != nullptr) {
      (*check_interrupt)();
    }
  }
}

// The attendant in the foreground goes. What came until now has been looked at, so that the
// background thread need not wake up just for having missed it.
void NamedEngine::leave() {
  bool has_own = false;
  {
    const std::lock_guard lock(mutex_);
    has_own = !in_flight_.empty();
  }
  std::uint32_t seen = channel_->events();
  channel_->leave_to_background(!has_own);
  do {
    seen = channel_->events();
    exchange();
    publish_finished();
  } while (channel_->events() != seen);
  const std::lock_guard lock(mutex_);
  attendant_ = Attendant::kNone;
}

// After leaving: somebody has to go on with what is left.
void NamedEngine::hand_on() {
  const std::lock_guard lock(mutex_);
  if (attendant_ != Attendant::kNone) {
    return;
  }
  if (n_waiters_ > 0) {
    changed_.notify_all();
  } else if (has_work() || !queue_.empty() || stop_thread_ ||
             (sleeps_until_called_ && !in_flight_.empty())) {
    call_background();
  }
}

void NamedEngine::background_loop() {
  name_this_thread("horon-named");
  std::unique_lock lock(mutex_);
  while (!stop_thread_) {
    std::uint32_t seen = channel_->events();
    std::chrono::nanoseconds limit = kForever;
    is_background_called_ = false;
    if (attendant_ == Attendant::kNone && n_waiters_ == 0) {
      attendant_ = Attendant::kBackground;
      lock.unlock();
      seen = attend_in_background();
      lock.lock();
      attendant_ = Attendant::kNone;
      if (n_waiters_ > 0) {
        changed_.notify_all();
        continue;  // to sleep until they are done
      }
      if (!queue_.empty()) {
        continue;
      }
      if (!in_flight_.empty() || (agreement_ && agreement_->is_waiting())) {
        limit = kLookAround;
      }
    }
    if (stop_thread_) {
      break;
    }
    sleeps_until_called_ = limit == kForever;
    lock.unlock();
    channel_->sleep(Sleeper::kBackground, seen, limit);
    lock.lock();
    sleeps_until_called_ = false;
  }
}

// Returns what events() was when there was nothing more to do.
std::uint32_t NamedEngine::attend_in_background() {
  channel_->attend();
  while (true) {
    const std::uint32_t seen = channel_->events();
    if (attend_once(nullptr)) {
      continue;
    }
    if (Clock::now() - last_look_ >= kLookAround) {
      look_around();
    }
    bool is_wanted = false;
    bool has_own = false;
    {
      const std::lock_guard lock(mutex_);
      is_wanted = n_waiters_ > 0 || stop_thread_;
      has_own = !in_flight_.empty();
    }
    if (!is_wanted && channel_->spin(seen)) {
      continue;
    }
    channel_->leave_to_background(!has_own);
    if (is_wanted || channel_->events() == seen) {
      return seen;
    }
    channel_->attend();
  }
}

// ---- What the attendant does ----------------------------------------------------------------

bool NamedEngine::attend_once(InterruptCheck check_interrupt) {
  bool did_something = exchange();
  if (!steps_.empty()) {
    did_something = true;
    run_step(check_interrupt);
  }
  publish_finished();
  return did_something;
}

// Everything but carrying out: never blocks.
bool NamedEngine::exchange() {
  if (!is_failed_ && channel_->is_poisoned()) {
    fail_all(channel_->failure());
  }
  try {
    bool did_something = announce_queued();
    if (!is_failed_) {
      did_something = take_messages() || did_something;
      did_something = deliver_decisions() || did_something;
      is_flushed_ = channel_->flush();
    }
    return did_something;
  } catch (const Error& error) {  // a damaged message, or a bug
    fail_all(concat("rank ", rank_, ": ", error.what()));
    return true;
  }
}

bool NamedEngine::announce_queued() {
  std::vector<Operation> submitted;
  bool wants_goodbye = false;
  {
    const std::lock_guard lock(mutex_);
    submitted.swap(queue_);
    wants_goodbye = wants_goodbye_;
  }
  if (is_failed_) {
    for (const Operation& operation : submitted) {
      finish(operation, failure_of(*operation));
    }
    return !submitted.empty();
  }
  std::vector<Announcement> announcements;
  bool is_urgent = false;
  for (const Operation& operation : submitted) {
    Announcement& announcement = announcements.emplace_back();
    std::string key = key_of(*operation->request);
    if (operation->request->kind == NamedKind::kJoin) {
      announcement.type = Announcement::Type::kJoin;
      is_urgent = true;
    } else {
      announcement.request = operation->request;
      announcement.id = cache_.find(*operation->request, key);
      announcement.type =
          announcement.id == kNoId ? Announcement::Type::kRequest : Announcement::Type::kKnown;
      is_urgent = is_urgent || operation->request->process_set != 0;
    }
    timeline_.announced(*operation->request);
    if (announced_.empty()) {
      waiting_since_ = Clock::now();
      has_poked_ = false;
    }
    announced_[std::move(key)] = operation;
  }
  if (wants_goodbye && !has_said_goodbye_) {
    has_said_goodbye_ = true;
    announcements.push_back({Announcement::Type::kGoodbye, kNoId, nullptr});
    is_urgent = true;
  }
  if (announcements.empty()) {
    return false;
  }
  if (agreement_) {
    take_announcements(0, announcements);
  } else {
    channel_->send(0, encode(announcements), is_urgent);
  }
  return true;
}

bool NamedEngine::take_messages() {
  int source = 0;
  ControlChannel::Bytes bytes;
  bool any = false;
  while (channel_->receive(&source, &bytes)) {
    any = true;
    if (agreement_) {
      take_announcements(source, decode_announcements(bytes));
    } else {
      apply(decode_decisions(bytes));
    }
  }
  return any;
}

void NamedEngine::take_announcements(int source, const std::vector<Announcement>& announcements) {
  const Clock::time_point now = Clock::now();
  for (const Announcement& announcement : announcements) {
    switch (announcement.type) {
      case Announcement::Type::kRequest:
        agreement_->announce(source, announcement.request, now);
        break;
      case Announcement::Type::kKnown:
        agreement_->announce_known(source, announcement.id, now);
        break;
      case Announcement::Type::kJoin:
        agreement_->join(source);
        break;
      case Announcement::Type::kGoodbye:
        agreement_->depart(source, concat("rank ", source, " has shut down."));
        break;
    }
  }
}

bool NamedEngine::deliver_decisions() {
  if (!agreement_) {
    return false;
  }
  std::vector<Decision> decisions = agreement_->take();
  if (decisions.empty()) {
    return false;
  }
  std::vector<std::vector<const Decision*>> by_rank(static_cast<std::size_t>(n_ranks_));
  std::vector<Decision> own;
  bool are_all_for_all = true;
  for (const Decision& decision : decisions) {
    are_all_for_all = are_all_for_all && decision.only_ranks.empty() && decision.process_set == 0;
    const std::vector<int>& ranks = decision.only_ranks.empty()
                                        ? *agreement_->members(decision.process_set)
                                        : decision.only_ranks;
    for (const int rank : ranks) {
      by_rank[static_cast<std::size_t>(rank)].push_back(&decision);
    }
  }
  ControlChannel::Bytes common;
  if (are_all_for_all && n_ranks_ > 1) {
    common = encode(by_rank[0]);
  }
  for (int rank = 1; rank < n_ranks_; ++rank) {
    const auto& part = by_rank[static_cast<std::size_t>(rank)];
    if (!part.empty()) {
      channel_->send(rank, are_all_for_all ? common : encode(part), true);
    }
  }
  for (const Decision* decision : by_rank[0]) {
    own.push_back(*decision);
  }
  is_flushed_ = channel_->flush();
  apply(own);
  return true;
}

void NamedEngine::apply(const std::vector<Decision>& decisions) {
  using Type = Decision::Type;
  std::vector<BatchTensor> agreed;
  for (const Decision& decision : decisions) {
    switch (decision.type) {
      case Type::kRun:
      case Type::kRunKnown: {
        if (decision.type == Type::kRun && decision.id != kNoId) {
          cache_.define(decision.id, decision.request);
        }
        const RequestPtr request =
            decision.type == Type::kRun ? decision.request : cache_.request(decision.id);
        const Operation operation = take_announced(key_of(*request));
        if (operation) {
          timeline_.agreed(*request);
        }
        if (request->kind == NamedKind::kBarrier) {
          if (operation) {
            finish(operation);
          }
          break;
        }
        for (std::size_t tensor = 0; tensor < request->tensors.size(); ++tensor) {
          agreed.push_back({request, tensor, operation});
        }
        break;
      }
      case Type::kFail:
        if (const Operation operation =
                take_announced(key_of(decision.process_set, decision.name))) {
          timeline_.agreed(*operation->request);
          finish(operation, decision.is_usage_error
                                ? std::make_exception_ptr(UsageError(decision.text))
                                : std::make_exception_ptr(MismatchError(decision.text)));
        }
        break;
      case Type::kJoined:
        if (const Operation operation = take_announced(key_of(0, kJoinName))) {
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
          step.operation = take_announced(key_of(*decision.request));
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

NamedEngine::Operation NamedEngine::take_announced(const std::string& key) {
  const auto found = announced_.find(key);
  if (found == announced_.end()) {
    return nullptr;
  }
  Operation operation = std::move(found->second);
  announced_.erase(found);
  waiting_since_ = Clock::now();
  return operation;
}

void NamedEngine::run_step(InterruptCheck check_interrupt) {
  // Whoever takes part in this has to have been told before this rank waits for it.
  flush_all();
  if (is_failed_) {
    return;
  }
  const Step& step = steps_.front();
  const auto what = [&] {
    return step.batch.empty() ? describe(step.change) : describe(*step.batch.front().request);
  };
  try {
    step.batch.empty() ? change_sets(step) : run_batch(step.batch, check_interrupt);
  } catch (const Error& error) {
    fail_all(concat("rank ", rank_, ": ", what(), ": ", error.what()));
  } catch (const std::exception& error) {
    fail_all(concat("rank ", rank_, " was interrupted in ", what(), ": ", error.what()));
    if (check_interrupt != nullptr) {
      publish_finished();
      throw;
    }
  }
  if (!steps_.empty()) {
    steps_.pop_front();
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
    const WaitContext context{Deadline::after(options_.timeout), check_interrupt};
    found->second->run(batch, root, context);
  } catch (const MismatchError& mismatch) {
    error =
        std::make_exception_ptr(MismatchError(concat(describe(request), ": ", mismatch.what())));
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
    lane = make_lane_(id, ranks);
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
    found->second->lane().shutdown();
    executors_.erase(found);
  }
}

void NamedEngine::look_around() {
  last_look_ = Clock::now();
  if (is_failed_) {
    return;
  }
  if (const std::string failure = channel_->failure(); !failure.empty()) {
    fail_all(failure);
    return;
  }
  if (agreement_) {
    report_stalls();
    return;
  }
  if (has_said_goodbye_ && channel_->has_departed(0)) {
    const std::lock_guard lock(mutex_);
    has_goodbye_ = true;  // nobody is left to answer
    return;
  }
  if (announced_.empty()) {
    return;
  }
  if (channel_->has_departed(0)) {
    exchange();  // what it said before it left
    if (!announced_.empty() && steps_.empty() && !is_failed_) {
      fail_everything("rank 0, which coordinates, has shut down.");
    }
  } else if (!has_poked_ && last_look_ - waiting_since_ > kPokeAfter) {
    // It may sleep on an announcement that need not have woken it. Now it has to watch over it.
    has_poked_ = true;
    channel_->send(0, {}, true);
    is_flushed_ = channel_->flush();
  }
}

void NamedEngine::report_stalls() {
  const Clock::time_point now = Clock::now();
  if (options_.stall_shutdown.count() > 0) {
    agreement_->fail_stalled(now, options_.stall_shutdown);
    deliver_decisions();
  }
  if (options_.stall_check.count() > 0 && now - last_report_ >= options_.stall_check) {
    const std::string report = stall_report(agreement_->stalled(now, options_.stall_check));
    if (!report.empty()) {
      last_report_ = now;
      log_warning(report);
    }
  }
}

// ---- The end of operations ------------------------------------------------------------------

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
    changed_.notify_all();
  }
  for (const Operation& operation : queued) {
    finish(operation, failure_of(*operation));
  }
  for (const auto& [key, operation] : announced_) {
    finish(operation, failure_of(*operation));
  }
  announced_.clear();
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
    for (const TensorSpec& tensor : operation->request->tensors) {
      in_flight_.erase(key_of(operation->request->process_set, tensor.name));
    }
  }
  finished_.clear();
  if (n_waiters_ > 0) {
    changed_.notify_all();
  }
}

}  // namespace horon
