// HoronBackend: point-to-point messages.

#include <mutex>
#include <optional>
#include <utility>

#include "backend.h"
#include "errors.h"
#include "process_exit.h"
#include "tensor_memory.h"

namespace horon::torch_backend {
namespace {

// A message that Gloo carries. Its progress is Gloo's own, and Gloo tells of its end only to who
// waits (its works claim to be completed from the start): isCompleted() turns true through wait().
class GlooMessageWork final : public HoronWork {
 public:
  GlooMessageWork(const Origin& origin, const std::vector<at::Tensor>& tensors,
                  Collective collective, c10::intrusive_ptr<c10d::Work> inner)
      : HoronWork(origin, tensors, tensors),
        group_timeout_(origin.timeout),
        collective_(std::move(collective)),
        inner_(std::move(inner)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    // Once only: Gloo's works wait for another completion the second time.
    std::call_once(waited_, [&] {
      std::exception_ptr error;
      try {
        // Gloo knows the time that was left to meet.
        inner_->wait(timeout == kNoTimeout ? group_timeout_ : timeout);
        collective_.finish();
      } catch (...) {
        error = std::current_exception();
      }
      complete(error);
    });
    return HoronWork::wait(timeout);
  }

  int sourceRank() const override { return inner_->sourceRank(); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "horon: get_future: in this group Gloo carries messages between hosts, and tells of their ",
        "end only to who waits: call wait().");
  }

 private:
  const std::chrono::milliseconds group_timeout_;
  Collective collective_;
  const c10::intrusive_ptr<c10d::Work> inner_;
  std::once_flag waited_;
};

// A message of our own, with all that it needs until it is done.
struct Message final : P2pOp {
  // First, so that it goes last: to let go of a tensor takes the GIL, on whichever thread.
  std::optional<CallOut> call_out;
  Collective collective;
  c10::intrusive_ptr<HoronWork> work;
  std::shared_ptr<Hooks> hooks;
  std::weak_ptr<Group> group;

  bool is_for(const void* waiter) const override { return work.get() == waiter; }
  void complete(const std::exception_ptr& error, int source) noexcept override {
    call_out.emplace();
    std::exception_ptr outcome = error;
    if (!outcome) {
      try {
        collective.finish();
      } catch (...) {
        outcome = without_python(std::current_exception());
      }
      work->set_source_rank(source);
    }
    if (outcome && ends_group(outcome)) {
      if (const auto alive = group.lock()) {
        alive->set_failed();
      }
      hooks->on_abort->call_all_beside();
    }
    work->complete(translated(outcome));
  }

  // Lets go of everything, too: who starts a message may hold it for longer.
  void call_back() noexcept override {
    std::exchange(work, nullptr)->call_back();
    collective = Collective();
    call_out.reset();
  }
};

const char* title_of(c10d::OpType type) {
  switch (type) {
    case c10d::OpType::SEND:
      return "horon:send";
    case c10d::OpType::RECV:
      return "horon:recv";
    default:
      return "horon:recvAnySource";
  }
}

// What goes over Gloo for `tensor`: itself or a contiguous stand-in, and a byte for none, which
// Gloo does not carry.
std::vector<at::Tensor> carried_by_gloo(Collective& collective, const at::Tensor& tensor,
                                        bool is_send) {
  if (tensor.numel() == 0) {
    return {at::zeros({1}, at::TensorOptions(at::kByte))};
  }
  if (is_send) {
    stage_input(collective, tensor);
    collective.prepare();
    return {collective.copy_in.empty() ? tensor : collective.copy_in[0].first};
  }
  stage_output(collective, tensor, false);
  return {collective.copy_back.empty() ? tensor : collective.copy_back[0].second};
}

}  // namespace

void HoronBackend::check_rank(const char* operation, int peer) const {
  TORCH_CHECK_VALUE(peer >= 0 && peer < size_, "horon: ", operation, ": rank ", peer,
                    " is not in this group of ", size_, " ranks.");
}

HoronBackend::WorkPtr HoronBackend::issue_message(at::Tensor& tensor, int peer, int tag,
                                                  c10d::OpType op_type) {
  const bool is_send = op_type == c10d::OpType::SEND;
  const char* title = title_of(op_type);
  const auto op = std::make_shared<Message>();
  op->is_send = is_send;
  op->peer = peer;
  op->tag = tag;
  const auto timeout = resolve(c10d::kUnsetTimeout);
  op->deadline = Deadline::after(timeout);
  if (is_send) {
    const ConstSpan span = stage_input(op->collective, tensor);
    op->data = const_cast<std::byte*>(span.data);  // a send only reads
    op->bytes = span.bytes;
    op->collective.prepare();
  } else {
    const Span span = stage_output(op->collective, tensor, false);
    op->data = span.data;
    op->bytes = span.bytes;
  }
  auto work = make_work({op_type, title, timeout, true, HoronWork::Mover::kMessages},
                        sequence_.load(), {tensor}, {tensor});
  op->work = work;
  op->hooks = hooks_;
  op->group = group_;
  try {
    group_->p2p()->start(op);
  } catch (...) {
    stay_if_process_exits();
    rethrow_translated();
  }
  stay_if_process_exits();
  return work;
}

HoronBackend::WorkPtr HoronBackend::message_over_gloo(Tensors& tensors, int peer, int tag,
                                                      c10d::OpType op_type) {
  c10d::Backend& gloo = *group_->gloo();
  Collective collective;
  Tensors carried = carried_by_gloo(collective, tensors[0], op_type == c10d::OpType::SEND);
  WorkPtr inner;
  if (op_type == c10d::OpType::SEND) {
    inner = gloo.send(carried, peer, tag);
  } else if (op_type == c10d::OpType::RECV) {
    inner = gloo.recv(carried, peer, tag);
  } else {
    inner = gloo.recvAnysource(carried, tag);
  }
  HoronWork::Origin origin;
  origin.rank = rank_;
  origin.op_type = op_type;
  origin.profiling_title = title_of(op_type);
  origin.sequence = sequence_.load();
  origin.timeout = resolve(c10d::kUnsetTimeout);
  origin.hooks = hooks_;
  auto work = c10::make_intrusive<GlooMessageWork>(origin, tensors, std::move(collective), inner);
  stay_if_process_exits();
  const std::lock_guard lock(coalescing_mutex_);
  if (is_coalescing_) {
    coalesced_over_gloo_.push_back(work);
  }
  return work;
}

HoronBackend::WorkPtr HoronBackend::message_on_device(const at::Tensor& tensor, int peer,
                                                      c10d::OpType op_type) {
  const Call call{op_type, title_of(op_type), resolve(c10d::kUnsetTimeout), true};
  const DeviceCall device_call = to_device(call, sequence_.load());
  auto work = op_type == c10d::OpType::SEND ? device_side()->send(tensor, peer, device_call)
                                            : device_side()->recv(tensor, peer, device_call);
  stay_if_process_exits();
  return work;
}

namespace {

void check_message(const std::vector<at::Tensor>& tensors, int tag, bool is_send) {
  const char* operation = is_send ? "send" : "recv";
  TORCH_CHECK_VALUE(tensors.size() == 1, "horon: ", operation, ": expected one tensor, got ",
                    tensors.size(), ".");
  TORCH_CHECK_VALUE(tag >= 0, "horon: ", operation, ": tag must not be negative, got ", tag, ".");
  const at::Tensor& tensor = tensors[0];
  TORCH_CHECK(tensor.layout() == c10::kStrided, "horon: ", operation,
              ": expected a dense tensor, got layout ", tensor.layout(), ".");
  check_device(tensor, operation);
  check_memory(tensor, operation);
  if (!is_send) {
    check_elements_apart(tensor, operation);
  }
}

}  // namespace

HoronBackend::WorkPtr HoronBackend::send(Tensors& tensors, int destination, int tag) {
  group_->check_process("send");
  check_message(tensors, tag, true);
  check_rank("send", destination);
  if (tensors[0].is_cuda()) {
    return message_on_device(tensors[0], destination, c10d::OpType::SEND);
  }
  return group_->p2p() != nullptr
             ? issue_message(tensors[0], destination, tag, c10d::OpType::SEND)
             : message_over_gloo(tensors, destination, tag, c10d::OpType::SEND);
}

HoronBackend::WorkPtr HoronBackend::recv(Tensors& tensors, int source, int tag) {
  group_->check_process("recv");
  check_message(tensors, tag, false);
  check_rank("recv", source);
  if (tensors[0].is_cuda()) {
    return message_on_device(tensors[0], source, c10d::OpType::RECV);
  }
  return group_->p2p() != nullptr ? issue_message(tensors[0], source, tag, c10d::OpType::RECV)
                                  : message_over_gloo(tensors, source, tag, c10d::OpType::RECV);
}

HoronBackend::WorkPtr HoronBackend::recvAnysource(Tensors& tensors, int tag) {
  group_->check_process("recv");
  check_message(tensors, tag, false);
  TORCH_CHECK_NOT_IMPLEMENTED(!tensors[0].is_cuda(),
                              "horon: recv: CUDA tensors can not be received ",
                              "from any source, as NCCL has to know the sender; pass src.");
  return group_->p2p() != nullptr
             ? issue_message(tensors[0], kAnySource, tag, c10d::OpType::RECVANYSOURCE)
             : message_over_gloo(tensors, kAnySource, tag, c10d::OpType::RECVANYSOURCE);
}

}  // namespace horon::torch_backend
