// NamedEngine: tensors that are made while they are reduced. See Note [Made in parts] in
// part_maker.h.

#include "named/named_engine.h"

namespace horon {

bool NamedEngine::may_be_in_parts(const NamedRequest& request) const {
  return may_meet_ && request.kind == NamedKind::kAllReduce && request.device == DeviceKind::kCpu &&
         request.process_set == 0 && request.tensors.size() == 1 &&
         (request.op == NamedOp::kAverage || request.op == NamedOp::kSum) &&
         request.prescale == 1.0 && request.postscale == 1.0 &&
         request.tensors.front().bytes() >= kMeetForBytes;
}

std::optional<bool> NamedEngine::wants_parts(const NamedRequest& request) const {
  if (!may_be_in_parts(request)) {
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  const auto found = parts_trials_.find(&request);
  return found != parts_trials_.end() && found->second.wants_parts();
}

void NamedEngine::await_made(const std::vector<BatchTensor>& batch, bool in_parts,
                             const WaitContext& context) {
  for (const BatchTensor& tensor : batch) {
    PartMaker* const maker = tensor.operation ? tensor.operation->maker.get() : nullptr;
    if (maker == nullptr) {
      continue;
    }
    if (!maker->is_mine()) {
      maker->await_made(context);
    } else if (!in_parts) {
      maker->make_until(tensor.spec().bytes());
    }
  }
}

bool NamedEngine::exchange_parts(const BatchTensor& tensor, BatchExecutor& executor,
                                 const WaitContext& context) {
  const Operation& operation = tensor.operation;
  const bool makes =
      operation && operation->maker && operation->maker->is_mine() && operation->maker->has_more();
  const bool tries = makes || (operation && operation->began);
  PartsTrial::Told told;
  if (tries) {
    const std::lock_guard lock(mutex_);
    if (parts_trials_.size() >= kMostTrials && !parts_trials_.contains(tensor.request.get())) {
      parts_trials_.clear();  // they do not come again, it seems
    }
    told = parts_trials_[tensor.request.get()].tell();
  }
  const std::vector<std::int64_t> numbers =
      executor.gather_numbers({makes, told.times, told.whole_ns, told.parts_ns}, context);
  bool any_makes = false;
  std::vector<PartsTrial::Told> everyones;
  for (std::size_t i = 0; i < numbers.size(); i += 4) {
    any_makes = any_makes || numbers[i] != 0;
    everyones.push_back({numbers[i + 1], numbers[i + 2], numbers[i + 3]});
  }
  if (tries) {
    const std::lock_guard lock(mutex_);
    parts_trials_[tensor.request.get()].hear(everyones);
  }
  return any_makes;
}

void NamedEngine::note_making(const BatchTensor& tensor, bool in_parts) {
  const Operation& operation = tensor.operation;
  if (is_meeting_ && operation && operation->began) {
    const auto time = Clock::now() - *operation->began;
    const std::lock_guard lock(mutex_);
    parts_trials_[tensor.request.get()].took(in_parts, time);
  }
}

}  // namespace horon
