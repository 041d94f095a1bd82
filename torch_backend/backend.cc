#include "backend.h"

#include <pybind11/pybind11.h>

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/debug.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "core/error.h"
#include "core/rank_list.h"
#include "errors.h"
#include "in_turn.h"
#include "interrupt.h"
#include "joined_work.h"
#include "kept_context.h"
#include "live_groups.h"
#include "process_arena.h"
#include "process_exit.h"
#include "window.h"
#include "without_gil.h"

namespace horon::torch_backend {
namespace {

// Of "horon:all_reduce", as profilers want it; errors say whose they are already.
constexpr std::size_t kTitlePrefixLength = sizeof("horon:") - 1;

// How long a rank waits for the others before a tensor is reduced while it is made, or else after.
// With one millisecond, every second time two ranks missed each other in a backward pass.
constexpr std::chrono::milliseconds kPatienceForParts{4};

// As c10d::Work's events.
constexpr at::RecordScope kProfilerScope = at::RecordScope::USER_SCOPE;

// Whether the engine has thrown it, so that the other ranks know.
bool is_engines(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    return true;
  } catch (...) {
    return false;
  }
}

// An asynchronous collective in the lane's queue.
class CollectiveTask final : public Task {
 public:
  // `group` outlives the task's turns: a group ends by closing its lane.
  CollectiveTask(Group* group, std::shared_ptr<Hooks> hooks, Collective collective,
                 c10::intrusive_ptr<HoronWork> work, const Deadline& deadline, bool may_meet)
      : group_(group),
        hooks_(std::move(hooks)),
        collective_(std::move(collective)),
        work_(std::move(work)),
        deadline_(deadline),
        may_meet_(may_meet) {}

  bool try_start() noexcept override {
    try {
      // Not one of several parts, nor one whose stand-ins must be filled and emptied in its turn.
      is_started_ = collective_.is_plain() && group_->transport().start(collective_.requests[0]);
    } catch (...) {  // out of memory; execute() will say so
      is_started_ = false;
    }
    return is_started_;
  }
  bool await_start() noexcept override {
    return collective_.is_plain() && group_->transport().await_start();
  }
  bool meet() noexcept override {
    try {
      was_met_for_ = may_meet_ && (collective_.is_plain() || collective_.is_in_parts);
      if (was_met_for_ && collective_.maker) {  // others may read it as soon as they meet
        collective_.maker->make_until(collective_.requests[0].outputs[0].bytes);
      }
      const auto patience =
          collective_.is_in_parts ? kPatienceForParts : Transport::kMeetingPatience;
      return was_met_for_ && group_->transport().meet(collective_.requests[0], patience);
    } catch (...) {  // out of memory; execute() will say so
      return false;
    }
  }
  bool is_ready() noexcept override {
    return group_->transport().is_ready() || deadline_.has_passed();
  }

  void execute() noexcept override {
    call_out_.emplace();
    try {
      const bool is_callers_thread = InterruptScope::is_active();
      const WaitContext context{deadline_, is_callers_thread ? interrupt_check() : nullptr,
                                is_callers_thread};
      if (collective_.maker && !collective_.maker->is_mine()) {
        collective_.maker->await_made(context);
      }
      collective_.run([&](const Request& request) {
        is_started_ ? group_->transport().complete(request, context)
                    : group_->transport().run(request, context);
      });
      collective_.finish();
    } catch (...) {
      error_ = without_python(std::current_exception());
      if (collective_.is_in_parts && !is_engines(error_)) {
        // Others wait for the next part, and would take this rank's next operation for it.
        group_->transport().abort("a tensor that was reduced while it was made could not be made");
        group_->set_failed();
      }
      // Here, while it is this operation's turn: the group may be gone before complete().
      if (ends_group(error_)) {
        group_->set_failed();
        must_tell_of_abort_ = true;
      }
    }
  }

  void fail(const std::string& reason) noexcept override {
    if (was_met_for_) {
      group_->transport().let_go(collective_.requests[0]);
    }
    error_ = std::make_exception_ptr(GroupError(reason));
  }

  void complete() noexcept override {
    if (must_tell_of_abort_) {
      hooks_->on_abort->call_all_beside();
    }
    work_->complete(translated(error_));
  }

  void call_back() noexcept override {
    const c10::intrusive_ptr<HoronWork> work = std::move(work_);
    work->call_back();
  }

 private:
  // First, so that it goes last: what the other members let go of may be the end of a process
  // group.
  std::optional<CallOut> call_out_;
  Group* const group_;
  const std::shared_ptr<Hooks> hooks_;
  Collective collective_;
  c10::intrusive_ptr<HoronWork> work_;
  const Deadline deadline_;
  const bool may_meet_;
  std::exception_ptr error_;
  bool is_started_ = false;
  bool was_met_for_ = false;
  bool must_tell_of_abort_ = false;
};

// Elsewhere whoever asks for an asynchronous operation may want the time for something else than to
// compute. In a backward pass all ranks compute the same, and so come to it together.
bool is_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// Python's timedelta.max is negative by the time it has come here.
void check_timeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "horon: the timeout of a group: expected more than 0 ms, ",
                    "got ", timeout.count(), ". For one that never passes use ",
                    "timedelta(days=365); timedelta.max is out of PyTorch's range.");
}

// For a group of ranks of the default one: a member that is dead already never joins.
std::function<void()> checker_of(const std::vector<int>& global_ranks) {
  if (global_ranks.empty()) {
    return {};
  }
  return LiveGroups::checker(global_ranks,
                             concat("the group of ", name_ranks(global_ranks), " was made"));
}

}  // namespace

HoronBackend::HoronBackend(WithoutMembers /*tag*/, const c10::intrusive_ptr<c10d::Store>& store,
                           int rank, int size, c10::intrusive_ptr<BackendOptions> options,
                           GlooMaker make_gloo)
    : c10d::Backend(rank, size),
      store_(store),
      options_(std::move(options)),
      make_gloo_(std::move(make_gloo)),
      builder_(rank, size),
      hooks_(std::make_shared<Hooks>()) {
  check_timeout(options_->timeout);
}

HoronBackend::HoronBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                           c10::intrusive_ptr<BackendOptions> options, GlooMaker make_gloo,
                           Beginning beginning)
    : c10d::Backend(rank, size),
      store_(store),
      options_(std::move(options)),
      make_gloo_(std::move(make_gloo)),
      builder_(rank, size),
      hooks_(std::move(beginning.hooks)) {
  check_timeout(options_->timeout);
  const auto meeting_timeout = beginning.meeting_timeout.value_or(options_->timeout);
  check_timeout(meeting_timeout);
  try {
    options_->engine.validate();
    const GroupIdentity identity{rank, size, to_ints(options_->global_ranks_in_group)};
    if (!beginning.look_around && !options_->has_foreign_ranks) {
      beginning.look_around = checker_of(identity.global_ranks);
    }
    group_ = Group::make(store, identity, options_->engine, meeting_timeout, make_gloo_,
                         std::move(beginning.look_around));
    group_->set_timeout(options_->timeout);
    if (options_->has_foreign_ranks) {
      group_->set_has_foreign_ranks();
    }
  } catch (...) {
    rethrow_translated();
  }
  LiveGroups::instance().add(group_);
}

HoronBackend::~HoronBackend() {
  // Joining the lane's thread with the GIL held could wait for a callback that waits for the GIL.
  const WithoutGil no_gil;
  group_.reset();
}

void HoronBackend::leave() {
  const Deadline now = Deadline::after(std::chrono::milliseconds(0));
  group_->shutdown(now);
  visit_twins([&](Group& twin) { twin.shutdown(now); });
}

std::chrono::milliseconds HoronBackend::resolve(std::chrono::milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? group_->timeout() : timeout;
}

c10::intrusive_ptr<HoronWork> HoronBackend::make_work(const Call& call, std::uint64_t sequence,
                                                      const Tensors& inputs, Tensors outputs) {
  HoronWork::Origin origin;
  origin.rank = rank_;
  origin.op_type = call.op_type;
  // Making up the profiler's event costs more than the operation: only when somebody listens.
  const bool is_profiled = at::getStepCallbacksUnlessEmpty(kProfilerScope).has_value();
  origin.profiling_title = is_profiled ? call.title : nullptr;
  origin.sequence = sequence;
  origin.timeout = call.timeout;
  origin.mover = call.mover;
  origin.group = group_;
  origin.hooks = hooks_;
  auto work = c10::make_intrusive<HoronWork>(std::move(origin), inputs, std::move(outputs));
  if (!is_coalescing_.load(std::memory_order_relaxed)) {
    return work;
  }
  const std::lock_guard lock(coalescing_mutex_);
  if (is_coalescing_) {
    coalesced_.push_back(work);
  }
  return work;
}

void HoronBackend::keep_context_from_gloo() const {
  if (!shares_memory() || c10d::debug_level() == c10d::DebugLevel::Detail) {
    keep_python_context();
  }
}

HoronBackend::WorkPtr HoronBackend::issue(Collective collective, const Call& call) {
  group_->check_process(call.title + kTitlePrefixLength);
  if (collective.is_cuda()) {
    auto work =
        device_side()->issue(std::move(collective), to_device(call, sequence_.fetch_add(1)));
    stay_if_process_exits();
    return work;
  }
  keep_context_from_gloo();
  const std::uint64_t sequence = sequence_.fetch_add(1);
  if (!call.is_async) {
    const auto requests = c10::ArrayRef<Request>(collective.requests);
    run_now(requests, c10::ArrayRef<at::Tensor>(collective.inputs), call, &collective);
    collective.finish();
    return finished_work(call, sequence, c10::ArrayRef<at::Tensor>(collective.outputs));
  }
  auto work = make_work(call, sequence, collective.inputs, std::move(collective.outputs));
  auto task = std::make_shared<CollectiveTask>(group_.get(), hooks_, std::move(collective), work,
                                               Deadline::after(call.timeout), is_in_backward());
  try {
    group_->lane()->submit(task);
  } catch (...) {
    stay_if_process_exits();
    rethrow_translated();
  }
  stay_if_process_exits();
  return work;
}

std::shared_ptr<DeviceSide> HoronBackend::device_side() {
  return group_->device_side([this] {
    DeviceSideParts parts;
    parts.store = c10::make_intrusive<c10d::PrefixStore>("device", store_);
    parts.rank = rank_;
    parts.n_ranks = size_;
    parts.timeout = group_->timeout();
    parts.batch_bytes = options_->engine.cuda_batch_bytes;
    parts.make_gloo = make_gloo_;
    parts.group = group_;
    parts.hooks = hooks_;
    auto side = make_device_side(std::move(parts));
    if (is_coalescing_) {
      side->start_coalescing();
    }
    return side;
  });
}

DeviceCall HoronBackend::to_device(const Call& call, std::uint64_t sequence) {
  return {call.op_type, call.title, call.timeout, call.is_async, sequence};
}

void HoronBackend::eagerConnectSingleDevice(at::Device device) {
  group_->check_process("connect");
  if (device.is_cuda()) {
    device_side()->connect(device, group_->timeout());
  }
}

HoronBackend::WorkPtr HoronBackend::finished_work(const Call& call, std::uint64_t sequence,
                                                  c10::ArrayRef<at::Tensor> outputs) const {
  if (hooks_->on_completion.is_empty()) {
    return nullptr;  // Python then skips wait()
  }
  // The flight recorder learns from a Work that the operation has finished, not from a null one.
  auto work = c10::make_intrusive<FinishedWork>(rank_, call.op_type, sequence, outputs);
  hooks_->on_completion.call_all(work->completion_key());
  return work;
}

HoronBackend::WorkPtr HoronBackend::all_reduce_now(const at::Tensor& tensor,
                                                   const Reduction& reduction,
                                                   std::chrono::milliseconds timeout,
                                                   bool wants_work) {
  const Call call{c10d::OpType::ALLREDUCE, "horon:all_reduce", timeout, false};
  group_->check_process(call.title + kTitlePrefixLength);
  keep_context_from_gloo();
  const Request request = builder_.all_reduce_in_place(tensor, reduction);
  const std::uint64_t sequence = sequence_.fetch_add(1, std::memory_order_relaxed);
  const c10::ArrayRef<at::Tensor> tensors(tensor);
  run_now(c10::ArrayRef<Request>(request), tensors, call);
  return wants_work ? finished_work(call, sequence, tensors) : nullptr;
}

void HoronBackend::all_reduce_blocking(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (is_plain_cpu(tensor)) {
    all_reduce_now(tensor, to_reduction(op), resolve(c10d::kUnsetTimeout), false);
    return;
  }
  Tensors tensors = {tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = false;
  allreduce(tensors, options);
}

bool HoronBackend::may_meet() const {
  return shares_memory() && group_->shared()->peers.may_meet();
}

HoronBackend::WorkPtr HoronBackend::all_reduce_in_parts(const at::Tensor& tensor,
                                                        const c10d::ReduceOp& op,
                                                        std::shared_ptr<PartMaker> maker) {
  HORON_CHECK(is_plain_cpu(tensor), "parts need a plain tensor");
  const Request whole = builder_.all_reduce_in_place(tensor, to_reduction(op));
  Collective collective;
  for (std::size_t begin = 0; begin < whole.outputs[0].bytes; begin += kPartBytes) {
    const std::size_t bytes = std::min(kPartBytes, whole.outputs[0].bytes - begin);
    Request& part = collective.requests.emplace_back(whole);
    part.count = bytes / part.element_bytes;
    part.inputs[0] = {whole.inputs[0].data + begin, bytes};
    part.outputs[0] = {whole.outputs[0].data + begin, bytes};
  }
  collective.is_in_parts = true;
  collective.maker = std::move(maker);
  collective.device = tensor.device();
  collective.inputs = {tensor};  // which keep its memory alive as well
  collective.outputs = {tensor};
  return issue(std::move(collective),
               {c10d::OpType::ALLREDUCE, "horon:all_reduce", resolve(c10d::kUnsetTimeout), true});
}

void HoronBackend::run_now(c10::ArrayRef<Request> requests, c10::ArrayRef<at::Tensor> inputs,
                           const Call& call, Collective* staged) {
  std::optional<at::RecordFunction> profile;
  if (auto listeners = at::getStepCallbacksUnlessEmpty(kProfilerScope)) {
    profile.emplace(std::move(*listeners));
    profile->_setAsync();  // as c10d's own works appear in a trace
    std::vector<c10::IValue> values(inputs.begin(), inputs.end());
    profile->before(call.title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  }
  run_in_turn(*group_, *hooks_->on_abort, call.timeout, [&](const WaitContext& context) {
    const auto run_one = [&](const Request& request) { group_->transport().run(request, context); };
    if (staged != nullptr) {
      staged->run(run_one);
    } else {
      std::for_each(requests.begin(), requests.end(), run_one);
    }
  });
}

bool HoronBackend::supportsTensorAlloc(c10::DeviceIndex /*device*/) {
  return shares_memory() && arena_access().own != nullptr;
}

at::Tensor HoronBackend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(size >= 0, "horon: allocate_tensor: got a size of ", size, ".");
  if (!options.device().is_cpu()) {
    return at::empty({size}, options);
  }
  return empty_in_arena({size}, c10::typeMetaToScalarType(options.dtype()));
}

#if HORON_HAS_WINDOW
bool HoronBackend::supportsWindow() const {
  return shares_memory() && group_->shared()->arenas.is_usable() &&
         group_->shared()->arenas.own() != nullptr;
}

c10::intrusive_ptr<c10d::Window> HoronBackend::new_window(const std::optional<at::Tensor>& tensor) {
  group_->check_process("new_window");
  TORCH_CHECK(shares_memory(),
              "horon: new_window: the ranks of this group do not all share memory ",
              "(they are on several hosts, or in containers without a common IPC namespace), and ",
              "windows need that. Make a group of the ranks of one host: dist.new_group(ranks).");
  sequence_.fetch_add(1);
  return HoronWindow::make(group_, hooks_, tensor);
}
#endif

// Without GPUs as Gloo: batch_isend_irecv then returns a Work for each message, and an error in the
// middle of a batch leaves nothing open in torch.distributed.
bool HoronBackend::supportsCoalescing() const { return has_gpu_parts() && has_gpus(); }

void HoronBackend::startCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  TORCH_CHECK(!is_coalescing_, "horon: startCoalescing: a coalesced batch is already open.");
  is_coalescing_ = true;
  if (const auto side = group_->device_side()) {
    side->start_coalescing();
  }
}

HoronBackend::WorkPtr HoronBackend::endCoalescing() {
  std::vector<c10::intrusive_ptr<HoronWork>> parts;
  std::vector<WorkPtr> others;
  {
    const std::lock_guard lock(coalescing_mutex_);
    TORCH_CHECK(is_coalescing_, "horon: endCoalescing: no coalesced batch is open.");
    is_coalescing_ = false;
    parts.swap(coalesced_);
    others.swap(coalesced_over_gloo_);
  }
  const Call whole_call{c10d::OpType::COALESCED, "horon:coalesced", resolve(c10d::kUnsetTimeout),
                        true, HoronWork::Mover::kLane};
  if (const auto side = group_->device_side()) {
    if (WorkPtr on_device = side->end_coalescing(to_device(whole_call, sequence_.load()))) {
      others.push_back(std::move(on_device));
    }
  }
  if (!others.empty()) {
    if (!parts.empty()) {
      others.push_back(coalesced_work(std::move(parts), whole_call));
    }
    if (others.size() == 1) {
      return others[0];
    }
    return JoinedWork::make(rank_, std::move(others), hooks_);
  }
  return coalesced_work(std::move(parts), whole_call);
}

HoronBackend::WorkPtr HoronBackend::coalesced_work(std::vector<c10::intrusive_ptr<HoronWork>> parts,
                                                   Call call) {
  const bool are_messages = std::all_of(parts.begin(), parts.end(), [](const auto& part) {
    return part->mover() == HoronWork::Mover::kMessages;
  });
  call.mover = are_messages ? HoronWork::Mover::kMessages : HoronWork::Mover::kLane;
  const auto whole = make_work(call, sequence_.load(), {}, {});
  struct Progress {
    std::mutex mutex;
    std::size_t missing = 0;
    std::exception_ptr error;
  };
  const auto progress = std::make_shared<Progress>();
  progress->missing = parts.size() + 1;  // one for this function itself
  const auto end_part = [progress, whole](const std::exception_ptr& error) {
    {
      const std::lock_guard lock(progress->mutex);
      if (error && !progress->error) {
        progress->error = error;
      }
      if (--progress->missing > 0) {
        return;
      }
    }
    whole->complete(progress->error);
  };
  for (const auto& part : parts) {
    part->getFuture()->addCallback([end_part](c10::ivalue::Future& future) {
      end_part(future.hasError() ? future.exception_ptr() : nullptr);
    });
  }
  end_part(nullptr);
  return whole;
}

void HoronBackend::setTimeout(std::chrono::milliseconds timeout) {
  check_timeout(timeout);
  if (group_) {
    group_->set_timeout(timeout);
    visit_twins([timeout](Group& twin) { twin.set_timeout(timeout); });
  }
  options_->timeout = timeout;
}

c10d::ErrorType HoronBackend::getError() {
  bool has_failed = group_->has_failed();
  visit_twins([&](const Group& twin) { has_failed = has_failed || twin.has_failed(); });
  return has_failed ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void HoronBackend::abort() {
  hooks_->on_abort->call_all();
  const char* const reason = "the process group was aborted";
  group_->abort(reason);
  visit_twins([reason](Group& twin) { twin.abort(reason); });
}

void HoronBackend::give_up(const std::string& reason) {
  if (group_->is_open()) {
    hooks_->on_abort->call_all_beside();
    group_->abort(reason);
    visit_twins([&](Group& twin) { twin.abort(reason); });
  }
}

void HoronBackend::shutdown() {
  // Operations bring their own deadlines, so this ends.
  const Deadline end_of_time = Deadline::after(std::chrono::hours(24 * 365));
  group_->shutdown(end_of_time);
  visit_twins([&](Group& twin) { twin.shutdown(end_of_time); });
}

#if HORON_HAS_COMPLETION_HOOKS
void HoronBackend::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  hooks_->on_completion.add(id, [hook = std::move(hook)](std::uint64_t key) {
    c10d::CompletionHookArgs args;
    args.completionKey = key;
    hook(args);
  });
}
#endif

}  // namespace horon::torch_backend
