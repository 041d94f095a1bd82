#include "ddp_parts.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "core/error.h"
#include "core/log.h"
#include "core/options.h"
#include "lies_in_place.h"
#include "named/named_engine.h"

namespace horon::torch_backend {
namespace {

// DDP lays its buckets out anew before the second step.
constexpr std::int64_t kStepsBeforeTrials = 2;

bool is_large_weight(const at::Tensor& parameter, const at::Tensor& gradient) {
  return parameter.dim() == 2 && gradient.nbytes() >= NamedEngine::kMeetForBytes;
}

// Complete when all of these are, with this value, or at the first error.
c10::intrusive_ptr<c10::ivalue::Future> when_all(
    const std::vector<c10::intrusive_ptr<c10d::Work>>& works, const at::Tensor& value) {
  struct Progress {
    std::mutex mutex;
    std::size_t missing;
    bool has_ended = false;
  };
  const auto progress = std::make_shared<Progress>();
  progress->missing = works.size();
  auto whole =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  for (const auto& work : works) {
    work->getFuture()->addCallback([progress, whole, value](c10::ivalue::Future& future) {
      {
        const std::lock_guard lock(progress->mutex);
        --progress->missing;
        if (progress->has_ended || (progress->missing > 0 && !future.hasError())) {
          return;
        }
        progress->has_ended = true;
      }
      if (future.hasError()) {
        whole->setError(future.exception_ptr());
      } else {
        whole->markCompleted(std::vector<at::Tensor>{value});
      }
    });
  }
  return whole;
}

}  // namespace

DdpParts::DdpParts(c10::intrusive_ptr<c10d::ProcessGroup> group,
                   std::shared_ptr<GradientPlaces> places)
    : group_(std::move(group)), places_(std::move(places)) {}

DdpParts::~DdpParts() { forget(); }

void DdpParts::agree() {
  has_agreed_ = true;
  own_.reset();
  forget();
  buckets_.clear();  // what was issued early went to others
  in_parts_ = is_tried_ = has_changed_ = false;
  n_steps_alike_ = 0;
  next_ = 0;
  began_.reset();
  backend_ =
      c10::dynamic_intrusive_pointer_cast<HoronBackend>(group_->getBackend(c10::DeviceType::CPU));
  members_ = backend_ ? backend_->members() : std::weak_ptr<const void>();
  const bool may =
      places_ && backend_ && backend_->may_meet() && reduce_while_made_from_environment();
  if (!is_so_on_all(may)) {
    return;
  }
  try {
    own_ = backend_->make_twin();
  } catch (const std::exception& error) {
    log_warning(
        concat("ddp_in_arena: gradients are averaged when they are made, and not meanwhile, ",
               "since there was no group for that: ", error.what()));
  }
  if (!is_so_on_all(own_.defined())) {
    own_.reset();
  }
}

bool DdpParts::is_so_on_all(bool is_so) {
  std::vector<at::Tensor> vote{at::full({1}, static_cast<std::int64_t>(is_so), at::kLong)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MIN;
  options.asyncOp = false;
  if (const WorkPtr work = group_->allreduce(vote, options)) {
    work->wait();
  }
  return vote[0].item<std::int64_t>() != 0;
}

bool DdpParts::is_current() const {
  const auto now = backend_ ? backend_->members() : std::weak_ptr<const void>();
  return !members_.owner_before(now) && !now.owner_before(members_);
}

DdpParts::Bucket& DdpParts::see(c10d::GradBucket& bucket) {
  const std::size_t index = bucket.getIndex();
  buckets_.resize(bucket.isLast() ? index + 1 : std::max(buckets_.size(), index + 1));
  Bucket& known = buckets_[index];
  known.buffer = bucket.getBufferRef();
  const auto parameters = bucket.getParameters();
  const bool is_same = std::equal(
      parameters.begin(), parameters.end(), known.parameters.begin(), known.parameters.end(),
      [](const at::Tensor& a, const c10::TensorImpl* b) { return a.unsafeGetTensorImpl() == b; });
  if (is_same) {
    return known;
  }
  TORCH_CHECK(!in_parts_, "horon: ddp_in_arena: DDP has laid out its buckets anew in a later step ",
              "than its second. HORON_REDUCE_WHILE_MADE=off goes without knowing their layout.");
  has_changed_ = true;
  known = Bucket{.buffer = known.buffer};
  std::int64_t end = 0;
  const auto add_rest_until = [&](std::int64_t begin) {
    if (begin > end) {
      known.rest.push_back({end, begin - end});
    }
  };
  const bool is_plain = is_plain_cpu(known.buffer);  // it may be sparse
  const auto gradients = is_plain ? bucket.getGradients() : std::vector<at::Tensor>();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    known.parameters.push_back(parameters[i].unsafeGetTensorImpl());
    if (is_plain && is_large_weight(parameters[i], gradients[i])) {
      const Region region{gradients[i].storage_offset() - known.buffer.storage_offset(),
                          gradients[i].numel()};
      add_rest_until(region.begin);
      known.slices.push_back({.region = region, .parameter = parameters[i]});
      end = region.begin + region.count;
    }
  }
  add_rest_until(is_plain ? known.buffer.numel() : 0);
  return known;
}

c10::intrusive_ptr<c10::ivalue::Future> DdpParts::average(c10d::GradBucket& bucket) {
  if (!has_agreed_ || !is_current()) {
    agree();
  }
  c10::intrusive_ptr<Future> future;
  Bucket* const known = own_ ? &see(bucket) : nullptr;
  if (known != nullptr && in_parts_ && !known->slices.empty()) {
    future = when_all(issue_in_parts(*known), known->buffer);
  } else {
    future = issue({bucket.getBufferRef()})->getFuture();
  }
  if (known != nullptr && bucket.isLast()) {
    end_step(*future);
  }
  return future;
}

std::vector<DdpParts::WorkPtr> DdpParts::issue_in_parts(Bucket& bucket) {
  std::vector<WorkPtr> works;
  for (std::size_t i = 0; i < bucket.slices.size(); ++i) {
    Slice& slice = bucket.slices[i];
    const at::Tensor part = slice.region.of(bucket.buffer);
    if (!slice.work) {
      ++next_;
      works.push_back(own_->all_reduce_in_parts(part, c10d::ReduceOp::AVG, nullptr));
      continue;
    }
    const WorkPtr work = std::exchange(slice.work, nullptr);
    const at::Tensor issued = std::exchange(slice.issued, at::Tensor());
    const at::Tensor& gradient = slice.parameter.grad();
    const void* const address = address_of(gradient);
    if (address != part.const_data_ptr() && address != slice.address) {
      own_->give_up("a gradient that was averaged while it was made is lost");
      TORCH_CHECK(false, "horon: a gradient of sizes ", slice.parameter.sizes(), " was averaged ",
                  "while the backward pass made it, but has become something else before it came ",
                  "to its parameter. HORON_REDUCE_WHILE_MADE=off lets it come first.");
    }
    if (slice.address != part.const_data_ptr()) {
      // Something else was in the bucket, which has got other memory meanwhile.
      work->wait();
      std::memcpy(part.mutable_data_ptr(), slice.address, part.nbytes());
    }
    works.push_back(work);
  }
  if (!bucket.rest.empty()) {
    std::vector<at::Tensor> rest;
    rest.reserve(bucket.rest.size());
    for (const Region& region : bucket.rest) {
      rest.push_back(region.of(bucket.buffer));
    }
    works.push_back(issue(std::move(rest)));
  }
  return works;
}

DdpParts::WorkPtr DdpParts::issue(std::vector<at::Tensor> tensors) {
  if (tensors.size() == 1) {  // which may be met for
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::AVG;
    options.asyncOp = true;
    return group_->allreduce(tensors, options);
  }
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  options.asyncOp = true;
  return group_->allreduce_coalesced(tensors, options);
}

bool DdpParts::may_make(std::size_t parameter) const {
  if (!places_->is_lending()) {
    return false;
  }
  began_ = began_.value_or(Clock::now());
  return in_parts_ && parameter == next_ && may_average_.load(std::memory_order_relaxed) &&
         is_current();
}

void DdpParts::make(std::size_t parameter, const at::Tensor& gradient, PartMaker::Make make) {
  const auto maker = std::make_shared<PartMaker>(gradient.nbytes(), std::move(make));
  const auto [bucket, index] = watched_[parameter];
  Slice& slice = buckets_[bucket].slices[index];
  const at::Tensor part = slice.region.of(buckets_[bucket].buffer);
  if (gradient.const_data_ptr() == part.const_data_ptr()) {
    std::exception_ptr error;
    try {
      slice.work = own_->all_reduce_in_parts(part, c10d::ReduceOp::AVG, maker);
    } catch (...) {
      error = std::current_exception();
    }
    slice.issued = part;
    slice.address = part.const_data_ptr();
    ++next_;
    ++n_made_;
    if (error) {
      maker->finish();
      std::rethrow_exception(error);
    }
  }
  maker->finish();  // in any case: others may wait for it
}

void DdpParts::end_step(Future& last) {
  n_steps_alike_ = has_changed_ ? 1 : n_steps_alike_ + 1;
  if (n_steps_alike_ == 1) {
    watch();
    everyones_.clear();
    const std::lock_guard lock(mutex_);
    trial_ = {};
  } else if (is_tried_) {
    if (began_) {
      last.addCallback([weak = weak_from_this(), began = *began_, in_parts = in_parts_](Future&) {
        if (const auto self = weak.lock()) {
          const std::lock_guard lock(self->mutex_);
          self->trial_.took(in_parts, Clock::now() - began);
        }
      });
    }
    std::unique_lock lock(mutex_);
    const PartsTrial::Told told = trial_.tell();
    if (trial_.is_last_try()) {
      lock.unlock();
      everyones_ = exchange(told);
      lock.lock();
    }
    trial_.hear(everyones_.empty() ? std::vector{told} : everyones_);
  }
  has_changed_ = false;
  is_tried_ = n_steps_alike_ >= kStepsBeforeTrials && !watched_.empty();
  {
    const std::lock_guard lock(mutex_);
    in_parts_ = is_tried_ && trial_.wants_parts();
  }
  next_ = 0;
  began_.reset();
}

std::vector<PartsTrial::Told> DdpParts::exchange(const PartsTrial::Told& told) {
  at::Tensor own = at::tensor({told.times, told.whole_ns, told.parts_ns}, at::kLong);
  at::Tensor all = at::empty({3 * static_cast<std::int64_t>(group_->getSize())}, at::kLong);
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  if (const WorkPtr work = own_->_allgather_base(all, own, options)) {
    work->wait();
  }
  std::vector<PartsTrial::Told> everyones;
  const auto* numbers = all.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < all.numel(); i += 3) {
    everyones.push_back({numbers[i], numbers[i + 1], numbers[i + 2]});
  }
  return everyones;
}

void DdpParts::watch() {
  forget();
  // Held by DDP's reducer twice, by the place, and here; with DDP's hook behind it, and the place's
  // before, and one each of own gradients.
  const std::size_t n_hooks = places_->gradients() == DdpGradients::kOwn ? 2 : 1;
  const AccumulatorUse use{.n_holders = 4, .n_pre_hooks = n_hooks, .n_post_hooks = n_hooks};
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    for (std::size_t j = 0; j < buckets_[i].slices.size(); ++j) {
      const at::Tensor& parameter = buckets_[i].slices[j].parameter;
      accumulators_.push_back(torch::autograd::impl::grad_accumulator(parameter));
      watched_.emplace_back(i, j);
      // Of a subclass, other products might look like the gradient's.
      if (parameter.is_cpu() && parameter.has_storage() &&
          !parameter.unsafeGetTensorImpl()->is_python_dispatch()) {
        watch_products(accumulators_.back().get(), weak_from_this(), watched_.size() - 1, use);
      }
    }
  }
}

void DdpParts::forget() {
  for (const auto& accumulator : accumulators_) {
    forget_products(accumulator.get());
  }
  accumulators_.clear();
  watched_.clear();
}

}  // namespace horon::torch_backend
