#include "window.h"

#if HORON_HAS_WINDOW

#include <optional>

#include "collective.h"
#include "core/error.h"
#include "dtype_bridge.h"
#include "errors.h"
#include "finished_work.h"
#include "in_turn.h"
#include "interrupt.h"
#include "process_arena.h"
#include "process_exit.h"
#include "signal_work.h"
#include "tensor_memory.h"
#include "without_gil.h"

namespace horon::torch_backend {
namespace {

// Empty: peers can use the tensor's memory as it is. Not thrown, so that they get an error, too.
std::string why_unusable(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "expected a tensor, got None.";
  }
  if (tensor.layout() != c10::kStrided || !tensor.is_cpu()) {
    return concat("expected a dense CPU tensor, got layout ", tensor.layout(), " on ",
                  tensor.device(), ". Allocate it with horon.empty(...).");
  }
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    return concat("expected a contiguous tensor, got sizes ", tensor.sizes(), " and strides ",
                  tensor.strides(), ". Allocate a contiguous one with horon.empty(...).");
  }
  if (!has_memory(tensor)) {
    return concat("its storage of ", tensor.storage().nbytes(), " bytes is too small for its ",
                  tensor.numel(), " elements. Something has shrunk it.");
  }
  return "";
}

WindowTensor describe(const at::Tensor& tensor, bool is_usable) {
  WindowTensor described;
  if (!tensor.defined()) {
    return described;
  }
  described.dtype = to_dtype(tensor.scalar_type());
  described.type_code = static_cast<std::uint8_t>(tensor.scalar_type());
  if (is_usable) {
    described.count = static_cast<std::uint64_t>(tensor.numel());
    described.element_bytes = tensor.element_size();
    described.sizes = tensor.sizes().vec();
    described.data = data_of(tensor);
  }
  return described;
}

// What a window's operation returns, in the exceptions that users expect.
template <typename Call>
auto translate(const Call& call) {
  try {
    return call();
  } catch (...) {
    rethrow_translated();
  }
}

}  // namespace

c10::intrusive_ptr<HoronWindow> HoronWindow::make(const std::shared_ptr<Group>& group,
                                                  const std::shared_ptr<Hooks>& hooks,
                                                  const std::optional<at::Tensor>& tensor) {
  auto window = c10::make_intrusive<HoronWindow>(group, hooks);
  window->agree(tensor ? OpKind::kNewWindow : OpKind::kNewEmptyWindow,
                tensor.value_or(at::Tensor()));
  return window;
}

HoronWindow::HoronWindow(const std::shared_ptr<Group>& group, std::shared_ptr<Hooks> hooks)
    : rank_(group->shared()->peers.rank),
      group_(group),
      hooks_(std::move(hooks)),
      finished_(c10::make_intrusive<FinishedWork>(rank_, c10d::OpType::UNKNOWN, 0,
                                                  c10::ArrayRef<at::Tensor>())) {}

std::shared_ptr<Group> HoronWindow::open_group(const char* operation) const {
  auto group = group_.lock();
  if (group) {
    group->check_process(operation);
  }
  if (!group || !group->is_open()) {
    C10_THROW_ERROR(DistBackendError,
                    concat("horon: ", operation, ": the window's process group was destroyed or ",
                           "aborted. Use windows before destroy_process_group()."));
  }
  return group;
}

std::shared_ptr<HoronWindow::Registered> HoronWindow::registered(const char* operation) const {
  std::shared_ptr<Registered> registered;
  {
    const std::lock_guard lock(mutex_);
    registered = registered_;
  }
  TORCH_CHECK_VALUE(registered, "horon: window.", operation,
                    ": no tensor is registered. Call tensor_register() on all ranks first.");
  return registered;
}

void HoronWindow::agree(OpKind kind, const at::Tensor& tensor) {
  const auto group = open_group(name(kind));
  const WithoutGil no_gil;
  const auto run = [&](const Request& request, const auto& on_mismatch) {
    run_in_turn(*group, *hooks_->on_abort, group->timeout(), [&](const WaitContext& context) {
      try {
        group->transport().run(request, context);
      } catch (const MismatchError&) {
        on_mismatch();
        throw;
      }
      if (!has_window(kind)) {
        number_ = group->next_window();  // in turn, so that all ranks count alike
      }
    });
  };
  if (pattern(kind) == Pattern::kNone) {
    Request request;
    request.kind = kind;
    request.batch_digest = number_;
    run(request, [] {});
    set_registered(nullptr);
    return;
  }
  const std::string refusal = why_unusable(tensor);
  WindowOffer offer(kind, group->shared(), arena_access().lent, describe(tensor, refusal.empty()),
                    refusal, number_);
  run(offer.request(), [&] { offer.withdraw(); });
  translate(
      [&] { set_registered(std::make_shared<Registered>(offer.accept(), tensor.scalar_type())); });
}

void HoronWindow::set_registered(std::shared_ptr<Registered> registered) {
  const std::lock_guard lock(mutex_);
  registered_.swap(registered);  // the old one goes without the lock
}

void HoronWindow::tensor_register(const at::Tensor& tensor, bool /*owning*/) {
  // What is registered is the same on all ranks, so this is an error on all of them.
  TORCH_CHECK_VALUE(!has_registered(), "horon: window.tensor_register: a tensor is registered ",
                    "already. Call tensor_deregister() on all ranks first.");
  agree(OpKind::kWindowRegister, tensor);
}

void HoronWindow::tensor_deregister() {
  TORCH_CHECK_VALUE(has_registered(), "horon: window.tensor_deregister: no tensor is registered.");
  agree(OpKind::kWindowDeregister, at::Tensor());
}

bool HoronWindow::has_registered() const {
  const std::lock_guard lock(mutex_);
  return registered_ != nullptr;
}

c10::intrusive_ptr<c10d::Work> HoronWindow::put(const at::Tensor& tensor, int64_t target,
                                                int64_t offset, bool /*is_async*/,
                                                const c10d::PutOptions& /*options*/) {
  const auto registered = this->registered("put");
  TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == c10::kStrided && tensor.is_cpu(),
                    "horon: window.put: expected a dense CPU tensor, got ",
                    tensor.defined() ? tensor.toString() : "None", ".");
  TORCH_CHECK_VALUE(tensor.scalar_type() == registered->dtype, "horon: window.put to rank ", target,
                    ": expected dtype ", registered->dtype, " as the window has, got ",
                    tensor.scalar_type(), ". Cast the tensor first.");
  check_memory(tensor, "window.put");
  const at::Tensor plain =
      is_plain_cpu(tensor) ? tensor : tensor.detach().resolve_conj().resolve_neg().contiguous();
  translate([&] {
    registered->window.check_rank("put", target);
    const auto count = static_cast<std::uint64_t>(plain.numel());
    const auto* data = static_cast<const std::byte*>(count == 0 ? nullptr : plain.const_data_ptr());
    registered->window.put(static_cast<int>(target), offset, data, count);
  });
  return finished_;
}

c10::intrusive_ptr<c10d::Work> HoronWindow::signal(int64_t target, bool /*is_async*/,
                                                   const c10d::SignalOptions& /*options*/) {
  const auto registered = this->registered("signal");
  translate([&] {
    registered->window.check_rank("signal", target);
    registered->window.signal(static_cast<int>(target));
  });
  return finished_;
}

c10::intrusive_ptr<c10d::Work> HoronWindow::wait_signal(int64_t source, bool is_async,
                                                        const c10d::WaitSignalOptions& options) {
  const auto registered = this->registered("wait_signal");
  const auto group = open_group("window.wait_signal");
  const Deadline deadline =
      Deadline::after(options.timeout == c10d::kUnsetTimeout ? group->timeout() : options.timeout);
  // Shares the life of what is registered.
  const std::shared_ptr<horon::Window> window(registered, &registered->window);
  return translate([&]() -> c10::intrusive_ptr<c10d::Work> {
    window->check_rank("wait_signal", source);
    if (is_async) {
      return c10::make_intrusive<SignalWork>(rank_, window, static_cast<int>(source), deadline);
    }
    const WithoutGil no_gil;
    const InterruptScope interrupts;
    try {
      window->wait_signal(static_cast<int>(source), WaitContext{deadline, interrupt_check(), true});
    } catch (...) {
      stay_if_process_exits();
      interrupts.rethrow();
      throw;
    }
    stay_if_process_exits();
    return finished_;
  });
}

at::Tensor HoronWindow::map_remote_tensor(int64_t rank) {
  const auto registered = this->registered("map_remote_tensor");
  open_group("window.map_remote_tensor");
  translate([&] { registered->window.check_rank("map_remote_tensor", rank); });
  const std::shared_ptr<WindowAccess>& access = registered->window.access();
  const WindowPart& part = access->part(static_cast<int>(rank));
  const at::IntArrayRef sizes(part.sizes, part.n_dimensions);
  const auto options = at::TensorOptions(at::kCPU).dtype(registered->dtype);
  if (part.count == 0) {
    return at::empty(sizes, options);
  }
  return at::from_blob(access->data(static_cast<int>(rank)), sizes, [access](void*) {}, options);
}

c10d::WindowAttr HoronWindow::get_attr(int64_t rank) {
  const auto registered = this->registered("get_attr");
  translate([&] { registered->window.check_rank("get_attr", rank); });
  return {c10d::WindowAccessType::UNIFIED};
}

}  // namespace horon::torch_backend

#endif  // HORON_HAS_WINDOW
