// NamedEngine: what the attendant exchanges with the other ranks, and who is looked after. Nothing
// here carries out an operation.

#include <algorithm>

#include "core/error.h"
#include "core/log.h"
#include "core/who_died.h"
#include "named/named_engine.h"
#include "named/stall.h"
#include "watch/stall_report.h"

namespace horon {
namespace {

// After this time without an answer, and then as often, the coordinator is woken to watch over what
// is announced, and wakes the others.
constexpr std::chrono::milliseconds kPokeAfter{500};

// With Horovod's words, which scripts look for.
std::string shut_down_text(int rank) {
  return concat(
      "Horovod has been shut down. This was caused by an exception on one of the ranks or ",
      "an attempt to allreduce, allgather or broadcast a tensor after one of the ranks ",
      "finished execution: rank ", rank, " has shut down",
      rank == 0 ? ", which coordinates." : ".");
}

std::vector<const Decision*> pointers_to(const std::vector<Decision>& decisions) {
  std::vector<const Decision*> pointers;
  pointers.reserve(decisions.size());
  for (const Decision& decision : decisions) {
    pointers.push_back(&decision);
  }
  return pointers;
}

}  // namespace

bool NamedEngine::attend_once(InterruptCheck check_interrupt, bool gathers) {
  bool did_something = exchange(gathers);
  if (!steps_.empty()) {
    did_something = true;
    run_step(check_interrupt);
  }
  publish_finished();
  return did_something;
}

// Everything but carrying out: never blocks.
bool NamedEngine::exchange(bool gathers) {
  if (!is_failed_ && channel_->is_poisoned()) {
    fail_all(channel_->failure());
  }
  try {
    bool did_something = announce_queued(gathers);
    if (!is_failed_) {
      did_something = take_messages() || did_something;
      did_something = deliver_decisions() || did_something;
      is_flushed_ = channel_->flush();
    }
    return did_something;
  } catch (const std::exception& error) {  // a damaged message, no memory, or a bug
    fail_all(concat("rank ", rank_, ": ", error.what()));
    return true;
  }
}

// What has been gathered long enough is left for later where a device would only queue it.
void NamedEngine::wait_for_devices() {
  const auto may_wait = [this] {
    return has_device_work_ && waiters_.empty() && !wants_goodbye_ && !queue_.empty() &&
           gathering_.may_wait_for_device(Clock::now());
  };
  {
    const std::lock_guard lock(mutex_);
    if (!may_wait()) {
      return;
    }
  }
  const std::size_t n_batches = look_at_devices();
  const std::lock_guard lock(mutex_);
  if (n_batches >= kBatchesToWaitFor && may_wait()) {
    gathering_.wait_for_device(Clock::now());
  }
}

bool NamedEngine::announce_queued(bool gathers) {
  if (gathers) {
    wait_for_devices();
  }
  std::vector<Operation> submitted;
  bool wants_goodbye = false;
  {
    const std::lock_guard lock(mutex_);
    wants_goodbye = wants_goodbye_;
    if (!gathers || wants_goodbye || gather_time().count() <= 0) {
      submitted.swap(queue_);
      is_queue_told_ = false;
      gathering_ = {};
    }
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
    if (operation->request->kind == NamedKind::kJoin) {
      announcement.type = Announcement::Type::kJoin;
      is_urgent = true;
    } else {
      announcement.request = operation->request;
      announcement.id = cache_.find(*operation->request, operation->keys().front());
      announcement.type =
          announcement.id == kNoId ? Announcement::Type::kRequest : Announcement::Type::kKnown;
      is_urgent = is_urgent || operation->request->process_set != 0;
    }
    timeline_.announced(*operation->request);
    if (announced_.empty()) {
      waiting_since_ = Clock::now();
    }
    announced_.add(operation, announcement.id);
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
      const std::vector<Decision> decisions = decode_decisions(bytes);
      apply(pointers_to(decisions));
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
        agreement_->depart(source, shut_down_text(source));
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
  const bool are_all_for_all =
      std::all_of(decisions.begin(), decisions.end(), [](const Decision& decision) {
        return decision.only_ranks.empty() && decision.process_set == 0;
      });
  std::vector<const Decision*> own = pointers_to(decisions);
  if (are_all_for_all) {
    const ControlChannel::Bytes common = n_ranks_ > 1 ? encode(own) : ControlChannel::Bytes();
    for (int rank = 1; rank < n_ranks_; ++rank) {
      channel_->send(rank, common, true);
    }
  } else {
    own = send_to_each(decisions);
  }
  is_flushed_ = channel_->flush();
  apply(own);
  return true;
}

// Each rank gets its own. Returns this one's.
std::vector<const Decision*> NamedEngine::send_to_each(const std::vector<Decision>& decisions) {
  std::vector<std::vector<const Decision*>> by_rank(static_cast<std::size_t>(n_ranks_));
  for (const Decision& decision : decisions) {
    const std::vector<int>& ranks = decision.only_ranks.empty()
                                        ? *agreement_->members(decision.process_set)
                                        : decision.only_ranks;
    for (const int rank : ranks) {
      by_rank[static_cast<std::size_t>(rank)].push_back(&decision);
    }
  }
  for (int rank = 1; rank < n_ranks_; ++rank) {
    const auto& part = by_rank[static_cast<std::size_t>(rank)];
    if (!part.empty()) {
      channel_->send(rank, encode(part), true);
    }
  }
  return std::move(by_rank[0]);
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
  if (has_device_work_) {  // written by the attendant alone
    look_at_devices();
    if (is_failed_) {
      return;
    }
  }
  if (agreement_) {
    report_stalls();
    if (agreement_->is_waiting() && may_poke()) {
      // Somebody may have submitted it and put off waiting for it.
      last_poke_ = last_look_;
      for (int rank = 1; rank < n_ranks_; ++rank) {
        if (!channel_->has_departed(rank)) {
          channel_->send(rank, {}, true);
        }
      }
      is_flushed_ = channel_->flush();
    }
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
      fail_everything(shut_down_text(0));
    }
  } else if (may_poke()) {
    // It may sleep on an announcement that need not have woken it. Now it has to watch over it.
    last_poke_ = last_look_;
    channel_->send(0, {}, true);
    is_flushed_ = channel_->flush();
  }
}

// See Note [Batches on a device]. Returns how many batches one of them still has.
std::size_t NamedEngine::look_at_devices() {
  std::size_t n_batches = 0;
  try {
    for (const auto& [id, executor] : executors_) {
      DeviceBatches* const device = executor->lane().device_batches();
      if (device == nullptr) {
        continue;
      }
      if (const DeviceFailure failure = device->check(); !failure.text.empty()) {
        const std::string reason = concat("rank ", rank_, ": ", failure.text);
        fail_all(failure.may_be_a_death ? with_channel_failure(reason) : reason);
        return 0;
      }
      n_batches = std::max(n_batches, device->n_under_way());
    }
  } catch (const std::exception& error) {
    fail_all(concat("rank ", rank_, ": a device can not be asked any more: ", error.what()));
    return 0;
  }
  const std::lock_guard lock(mutex_);
  has_device_work_ = n_batches > 0;
  return n_batches;
}

// For what a device reports; see Note [Whose connection it was].
std::string NamedEngine::with_channel_failure(const std::string& reason) const {
  return with_the_dead(reason, [this] { return channel_->failure(); });
}

bool NamedEngine::may_poke() const {
  return last_look_ - std::max(waiting_since_, last_poke_) > kPokeAfter;
}

void NamedEngine::report_stalls() {
  const Clock::time_point now = Clock::now();
  if (options_.stall_shutdown.count() > 0) {
    agreement_->fail_stalled(now, options_.stall_shutdown);
    deliver_decisions();
  }
  if (options_.stall_check.count() > 0 && now - last_report_ >= options_.stall_check) {
    const auto stalled = agreement_->stalled(now, options_.stall_check);
    if (!stalled.empty()) {
      last_report_ = now;
      ask_about(channel_->late_ranks(missing_ranks(stalled)), false,
                [report = stall_report(stalled)](const std::string& about) {
                  log_warning(report + about);
                });
    }
  }
}

}  // namespace horon
