// DDP's gradients that are reduced while they are made.
//
// Note [DDP's gradients in parts]
// What DistributedOptimizer does (Note [Made in parts] in named/part_maker.h) for the buckets of
// DDP in the arena whose gradients are made in their places (Note [Gradients in their places]). A
// bucket with large weights is not one operation then but several: one for each of these weights,
// part by part, and one for what is left. A weight's is issued as soon as its gradient begins to be
// made, if it is the next one of these in DDP's order, and otherwise with the bucket: which of the
// two is a rank's own affair, since the parts are the same. One rank may have a hook where another
// has none, or another number of rows. So that no other operation of a backward pass comes before
// them on one rank and after them on another, they have a group of their own, of the same ranks.
//
// That a step's buckets go like this is decided by all ranks alike: by the number of steps since
// the buckets had the layout that they have (DDP lays them out anew after the first step), and by
// what the ranks have told each other about the trials of Note [Trials] in named/parts_trial.h,
// which here are whole backward passes, from their first large product until everything is reduced.
#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "backend.h"
#include "gradient_places.h"
#include "gradient_product.h"
#include "named/parts_trial.h"

namespace horon::torch_backend {

// Averages the buckets of one model. Thread safety: in the model's backward passes, one thread at a
// time. Ownership: by a std::shared_ptr.
class DdpParts final : public GradientProducts, public std::enable_shared_from_this<DdpParts> {
 public:
  using Future = c10::ivalue::Future;

  // `places`: null if gradients are not made in the buckets; then nothing is made in parts.
  DdpParts(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<GradientPlaces> places);
  ~DdpParts() override;

  // Whether the backward pass that follows makes gradients in their places; requires places. And
  // whether large ones may be averaged meanwhile: not where a gradient may come in several backward
  // passes within one, as with DDP's static graphs and reentrant checkpoints.
  // Thread safety: any thread.
  void set_lending(bool is_lending, bool may_average) {
    may_average_.store(may_average, std::memory_order_relaxed);
    places_->set_lending(is_lending);
  }

  // Of the bucket's buffer; to be called for one bucket after another, as DDP does.
  c10::intrusive_ptr<Future> average(c10d::GradBucket& bucket);

  bool may_make(std::size_t parameter) const override;
  void make(std::size_t parameter, const at::Tensor& gradient, PartMaker::Make make) override;

  // How many gradients were reduced while they were made.
  std::int64_t n_made() const { return n_made_.load(std::memory_order_relaxed); }

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Clock = std::chrono::steady_clock;
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));

  // Elements of a bucket.
  struct Region {
    std::int64_t begin = 0;
    std::int64_t count = 0;

    at::Tensor of(const at::Tensor& buffer) const { return buffer.narrow(0, begin, count); }
  };
  // A large weight's part of a bucket.
  struct Slice {
    Region region;
    at::Tensor parameter;
    // In a step in which it was issued before its bucket:
    WorkPtr work;
    at::Tensor issued;  // keeps the memory, unless the bucket has moved
    const void* address = nullptr;
  };
  struct Bucket {
    std::vector<const c10::TensorImpl*> parameters;
    at::Tensor buffer;
    std::vector<Slice> slices;
    std::vector<Region> rest;
  };
  // A slice: of which bucket, which one.
  using Position = std::pair<std::size_t, std::size_t>;

  // Finds out, with all ranks, whether anything may be made in parts.
  void agree();
  bool is_so_on_all(bool is_so);
  // Whether that was with the ranks that the group has now.
  bool is_current() const;
  Bucket& see(c10d::GradBucket& bucket);
  std::vector<WorkPtr> issue_in_parts(Bucket& bucket);
  // Averages them, whole, in the group itself.
  WorkPtr issue(std::vector<at::Tensor> tensors);
  void end_step(Future& last);
  void watch();
  void forget();
  std::vector<PartsTrial::Told> exchange(const PartsTrial::Told& told);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::shared_ptr<GradientPlaces> places_;
  c10::intrusive_ptr<HoronBackend> backend_;  // of the group; null: not horon's
  c10::intrusive_ptr<HoronBackend> own_;      // its twin; null: nothing is made in parts
  std::weak_ptr<const void> members_;
  bool has_agreed_ = false;
  std::vector<Bucket> buckets_;
  bool has_changed_ = false;                        // the layout, in this step
  std::int64_t n_steps_alike_ = 0;                  // with this layout
  std::vector<Position> watched_;                   // in DDP's order
  std::vector<Accumulator> accumulators_;           // of those
  bool is_tried_ = false;                           // this step counts as one of a trial
  bool in_parts_ = false;                           // this step
  std::size_t next_ = 0;                            // of those that are watched, in this step
  mutable std::optional<Clock::time_point> began_;  // this step's first large product
  std::atomic<std::int64_t> n_made_{0};
  std::atomic<bool> may_average_{false};
  std::vector<PartsTrial::Told> everyones_;  // after the last trial
  std::mutex mutex_;
  PartsTrial trial_;  // guarded by mutex_
};

}  // namespace horon::torch_backend
