#include "ddp_arena_hook.h"

#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "process_arena.h"

namespace horon::torch_backend {
namespace {

// Thread safety: run by autograd's thread of the model, one bucket after another.
class DdpArenaHook final : public c10d::CommHookInterface {
 public:
  DdpArenaHook(c10::intrusive_ptr<c10d::ProcessGroup> group, bool keep_old_memory)
      : group_(std::move(group)), keep_old_memory_(keep_old_memory) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const at::Tensor& buffer = bucket.getBufferRef();
    if (!is_in_arena(buffer) && buffer.numel() > 0 && !is_out_of_room_) {
      move(buffer);
    }
    std::vector<at::Tensor> tensors{buffer};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::AVG;
    options.asyncOp = true;
    return group_->allreduce(tensors, options)->getFuture();
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  void move(const at::Tensor& buffer) {
    try {
      c10::DataPtr old = move_storage_to_arena(buffer);
      if (keep_old_memory_) {
        kept_.push_back(std::move(old));
      }
    } catch (const c10::OutOfMemoryError& error) {
      is_out_of_room_ = true;
      log_warning(concat("ddp_in_arena: a bucket of ", buffer.nbytes(),
                         " bytes stays outside, and is averaged through copies: ",
                         error.what_without_backtrace()));
    }
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const bool keep_old_memory_;
  bool is_out_of_room_ = false;
  std::vector<c10::DataPtr> kept_;
};

}  // namespace

void register_ddp_arena_hook(c10d::Reducer& reducer,
                             const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                             bool keep_old_memory) {
  reducer.register_comm_hook(std::make_unique<DdpArenaHook>(group, keep_old_memory));
}

}  // namespace horon::torch_backend
