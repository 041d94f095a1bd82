// The handle of a coalesced batch whose parts travelled in different ways.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "compat.h"
#include "finished_work.h"
#include "hooks.h"

namespace horon::torch_backend {

// Thread safety: as its parts.
class JoinedWork final : public c10d::Work {
 public:
  static c10::intrusive_ptr<JoinedWork> make(int rank,
                                             std::vector<c10::intrusive_ptr<c10d::Work>> parts,
                                             std::shared_ptr<Hooks> hooks) {
    return c10::make_intrusive<JoinedWork>(rank, std::move(parts), std::move(hooks));
  }
  JoinedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts,
             std::shared_ptr<Hooks> hooks)
      : c10d::Work(rank, c10d::OpType::COALESCED),
        completion_key_(next_completion_key()),
        parts_(std::move(parts)),
        hooks_(std::move(hooks)) {}

  // Waits for one part after the other; throws the first error.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    for (const auto& part : parts_) {
      part->wait(timeout);
    }
    std::call_once(told_, [this] { hooks_->on_completion.call_all(completion_key_); });
    return true;
  }
  void synchronize() override { wait(); }
  bool isCompleted() override {
    bool all = true;
    for (const auto& part : parts_) {
      all = part->isCompleted() && all;
    }
    return all;
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (const auto& part : parts_) {
      const auto outputs = part->result();
      all.insert(all.end(), outputs.begin(), outputs.end());
    }
    return all;
  }
  // Blocks until all parts are done: some of them tell of their end only to who waits.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait();
    const std::vector<at::Tensor> outputs = result();
    std::vector<c10::Device> devices;
    for (const at::Tensor& output : outputs) {
      if (!output.is_cpu() && std::count(devices.begin(), devices.end(), output.device()) == 0) {
        devices.push_back(output.device());
      }
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), devices);
    future->markCompleted(at::IValue(outputs));
    return future;
  }
#if HORON_HAS_COMPLETION_HOOKS
  uint64_t getCompletionKey() const override { return completion_key_; }
#endif

 private:
  const std::uint64_t completion_key_;
  const std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
  const std::shared_ptr<Hooks> hooks_;
  std::once_flag told_;
};

}  // namespace horon::torch_backend
