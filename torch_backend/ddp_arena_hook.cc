#include "ddp_arena_hook.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "process_arena.h"

namespace horon::torch_backend {
namespace {

// Thread safety: run by autograd's thread of the model, one bucket after another.
class DdpArenaHook final : public c10d::CommHookInterface {
 public:
  DdpArenaHook(std::shared_ptr<GradientPlaces> places, std::shared_ptr<DdpParts> parts,
               std::shared_ptr<OwnGradients> own)
      : places_(std::move(places)), parts_(std::move(parts)), own_(std::move(own)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    // A rank that has joined has buckets of its own, which are not the model's, for a moment.
    if (torch::autograd::get_current_graph_task_id() != -1) {
      prepare(bucket);
    }
    return parts_->average(bucket);
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  void prepare(c10d::GradBucket& bucket) {
    const at::Tensor& buffer = bucket.getBufferRef();
    const bool may_move = is_plain_cpu(buffer) && buffer.numel() > 0;  // it may be sparse
    if (may_move && !is_in_arena(buffer) && !is_out_of_room_) {
      move(buffer);
    }
    if (may_move && places_ && is_in_arena(buffer)) {
      set_places(bucket, buffer.data_ptr());
    }
    if (places_ && bucket.isLast()) {
      places_->set_lending(false);
      if (own_) {
        own_->end_after_backward();
      }
    }
  }

  void set_places(const c10d::GradBucket& bucket, const void* address) {
    known_.resize(std::max(known_.size(), bucket.getIndex() + 1));
    const void*& known = known_[bucket.getIndex()];
    if (known != address) {
      known = address;
      places_->set(bucket.getParameters(), bucket.getGradients());
    }
  }

  void move(const at::Tensor& buffer) {
    try {
      c10::DataPtr old = move_storage_to_arena(buffer);
      if (places_ && !own_) {
        kept_.push_back(std::move(old));
      }
    } catch (const c10::OutOfMemoryError& error) {
      is_out_of_room_ = true;
      log_warning(concat("ddp_in_arena: a bucket of ", buffer.nbytes(),
                         " bytes stays outside, and is averaged through copies: ",
                         error.what_without_backtrace()));
    }
  }

  bool is_out_of_room_ = false;
  const std::shared_ptr<GradientPlaces> places_;  // null: gradients are copied
  const std::shared_ptr<DdpParts> parts_;
  const std::shared_ptr<OwnGradients> own_;  // null: gradients are not kOwn
  std::vector<c10::DataPtr> kept_;
  std::vector<const void*> known_;  // the buckets' addresses when places were set, by index
};

}  // namespace

std::shared_ptr<DdpParts> register_ddp_arena_hook(
    c10d::Reducer& reducer, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    DdpGradients gradients, std::shared_ptr<OwnGradients> own) {
  std::shared_ptr<GradientPlaces> places;
  if (gradients != DdpGradients::kCopied) {
    places = own ? own->places() : std::make_shared<GradientPlaces>(gradients);
  }
  auto parts = std::make_shared<DdpParts>(group, places);
  reducer.register_comm_hook(
      std::make_unique<DdpArenaHook>(std::move(places), parts, std::move(own)));
  return parts;
}

}  // namespace horon::torch_backend
