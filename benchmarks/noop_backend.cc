// A c10d backend that does nothing: what a call through torch.distributed costs any backend that is
// not PyTorch's own. Synchronous operations return a null Work, which is the least that c10d
// allows. Asked to report, it returns a finished Work instead and tells the flight recorder so
// (torch 2.15), which is the least for a backend whose operations are not to look as if they hung.
// Given shared memory, all-reduces and barriers of ranks on one host end when all ranks have begun
// them, and a message's receive when it was sent, with nothing else: no data, no errors, no
// deadlines. With a core for every rank no backend of c10d can be faster that has to wait for the
// others; with fewer, one can that has its ranks spread over them.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <optional>
#include <string>

#include <torch/python.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#if __has_include(<torch/csrc/distributed/c10d/Hooks.hpp>)
#define HORON_NOOP_HAS_HOOKS 1
#endif

namespace py = pybind11;

namespace {

class DoneWork final : public c10d::Work {
 public:
  explicit DoneWork(std::vector<at::Tensor> tensors, std::uint64_t key = 0)
      : tensors_(std::move(tensors)), key_(key) {}

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  // DDP asks for it.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(tensors_));
    return future;
  }
#if HORON_NOOP_HAS_HOOKS
  uint64_t getCompletionKey() const override { return key_; }
#endif

 private:
  const std::vector<at::Tensor> tensors_;
  const std::uint64_t key_;
};

// Counters of ranks on one host: [rank][peer], the rank's own for meetings. Never unmapped.
class Meeting {
 public:
  static std::size_t bytes(int size) {
    return sizeof(Word) * static_cast<std::size_t>(size * size);
  }

  Meeting(const std::string& path, int rank, int size) : rank_(rank), size_(size) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    TORCH_CHECK(fd >= 0, "noop: cannot open ", path);
    void* memory = ::mmap(nullptr, bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
    TORCH_CHECK(memory != MAP_FAILED, "noop: cannot map ", path);
    words_ = static_cast<Word*>(memory);
  }

  void meet() {
    const std::uint32_t count = advance(rank_);
    for (int offset = 1; offset < size_; ++offset) {
      const int peer = (rank_ + offset) % size_;
      await(word(peer, peer), count);
    }
  }
  void send(int peer) { advance(peer); }
  void recv(int peer) { await(word(peer, rank_), ++received_[peer]); }

 private:
  struct alignas(128) Word {
    std::atomic<std::uint32_t> count;
  };

  std::atomic<std::uint32_t>& word(int rank, int peer) { return words_[rank * size_ + peer].count; }
  std::uint32_t advance(int peer) {
    auto& count = word(rank_, peer);
    const std::uint32_t next = count.load(std::memory_order_relaxed) + 1;
    count.store(next, std::memory_order_release);
    return next;
  }
  void await(const std::atomic<std::uint32_t>& count, std::uint32_t target) const {
    const int n_pauses = size_ > 2 ? 2 : 1000;  // as horon: on two cores
    for (int i = 0; static_cast<std::int32_t>(count.load(std::memory_order_acquire) - target) < 0;
         ++i) {
      if (i >= n_pauses) {
        ::sched_yield();
      } else {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
    }
  }

  const int rank_;
  const int size_;
  Word* words_ = nullptr;
  std::map<int, std::uint32_t> received_;
};

class NoopBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  NoopBackend(int rank, int size, bool reports, const std::string& shared)
      : c10d::Backend(rank, size), reports_(reports) {
    if (!shared.empty()) {
      meeting_.emplace(shared, rank, size);
    }
  }

#if HORON_NOOP_HAS_HOOKS
  bool supportsCompletionHooks() const override { return reports_; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    hooks_[id] = std::move(hook);
  }
  void unregisterCompletionHook(int64_t id) override { hooks_.erase(id); }
#endif

  const std::string getBackendName() const override { return "noop"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("noop");
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    if (meeting_) {
      meeting_->meet();
    }
    return done(o.asyncOp, tensors);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return done(o.asyncOp, tensors);
  }
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions& o) override { return done(o.asyncOp); }
  // DDP compares the ranks' parameters through it before it starts: here all are alike.
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& o) override {
    for (at::Tensor& output : outputs.at(0)) {
      output.copy_(inputs.at(0));
    }
    return done(o.asyncOp, outputs.at(0));
  }
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions& o) override {
    return done(o.asyncOp);
  }
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&,
                               const c10d::ReduceScatterOptions& o) override {
    return done(o.asyncOp);
  }
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions& o) override {
    return done(o.asyncOp);
  }
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions& o) override {
    return done(o.asyncOp);
  }
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions& o) override {
    return done(o.asyncOp);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    if (meeting_) {
      meeting_->meet();
    }
    return done(o.asyncOp);
  }
  WorkPtr send(Tensors&, int peer, int) override {
    if (meeting_) {
      meeting_->send(peer);
    }
    return done(true);
  }
  WorkPtr recv(Tensors&, int peer, int) override {
    if (meeting_) {
      meeting_->recv(peer);
    }
    return done(true);
  }

 private:
  WorkPtr done(bool is_async, const Tensors& tensors = {}) {
    if (!reports_) {
      return is_async ? WorkPtr(c10::make_intrusive<DoneWork>(tensors)) : WorkPtr();
    }
    static std::atomic<std::uint64_t> keys{std::uint64_t{1} << 62};  // never used by others here
    const std::uint64_t key = ++keys;
#if HORON_NOOP_HAS_HOOKS
    for (const auto& [id, hook] : hooks_) {
      c10d::CompletionHookArgs args;
      args.completionKey = key;
      hook(args);
    }
#endif
    return c10::make_intrusive<DoneWork>(tensors, key);
  }

  const bool reports_;
  std::optional<Meeting> meeting_;
#if HORON_NOOP_HAS_HOOKS
  std::map<std::int64_t, c10d::CompletionHook> hooks_;  // of one thread
#endif
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::module_::import("torch.distributed");  // registers the base class
  module.def("create",
             [](int rank, int size, bool reports,
                const std::string& shared) -> c10::intrusive_ptr<c10d::Backend> {
               return c10::make_intrusive<NoopBackend>(rank, size, reports, shared);
             });
  module.def("meeting_bytes", &Meeting::bytes);
}
