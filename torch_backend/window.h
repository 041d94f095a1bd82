// torch 2.15's one-sided windows over the arena: the c10d::Window of a group whose ranks share
// memory. See docs/windows.md.
#pragma once

#include "compat.h"

#if HORON_HAS_WINDOW

#include <memory>
#include <mutex>

#include "group.h"
#include "hooks.h"
#include "shm/window.h"

namespace horon::torch_backend {

// Thread safety: all methods. Those that change what is registered are collective, and take their
// turn with the group's collectives; the others concern nobody but the two ranks.
// Ownership: knows the group only weakly. What was mapped stays mapped without window and group.
class HoronWindow final : public c10d::Window {
 public:
  // Collective. Throws DistBackendError on every rank when the ranks disagree.
  static c10::intrusive_ptr<HoronWindow> make(const std::shared_ptr<Group>& group,
                                              const std::shared_ptr<Hooks>& hooks,
                                              const std::optional<at::Tensor>& tensor);

  // Use make().
  HoronWindow(const std::shared_ptr<Group>& group, std::shared_ptr<Hooks> hooks);

  // `owning` or not, the memory stays until all ranks have let go of it: Note [Lent memory].
  void tensor_register(const at::Tensor& tensor, bool owning) override;
  void tensor_deregister() override;

  // Done when it returns, asynchronous or not.
  c10::intrusive_ptr<c10d::Work> put(const at::Tensor& tensor, int64_t target, int64_t offset,
                                     bool is_async, const c10d::PutOptions& options) override;
  c10::intrusive_ptr<c10d::Work> signal(int64_t target, bool is_async,
                                        const c10d::SignalOptions& options) override;
  c10::intrusive_ptr<c10d::Work> wait_signal(int64_t source, bool is_async,
                                             const c10d::WaitSignalOptions& options) override;

  // A view of that rank's memory, in the shape of its tensor.
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10d::WindowAttr get_attr(int64_t rank) override;

 private:
  struct Registered {
    Registered(std::shared_ptr<WindowAccess> access, at::ScalarType type)
        : window(std::move(access)), dtype(type) {}
    horon::Window window;
    const at::ScalarType dtype;
  };

  std::shared_ptr<Group> open_group(const char* operation) const;
  std::shared_ptr<Registered> registered(const char* operation) const;
  // Runs a collective call of that kind, and registers or deregisters.
  void agree(OpKind kind, const at::Tensor& tensor);
  bool has_registered() const;
  void set_registered(std::shared_ptr<Registered> registered);

  const int rank_;
  const std::weak_ptr<Group> group_;
  const std::shared_ptr<Hooks> hooks_;
  // What finished operations return: they do not differ.
  const c10::intrusive_ptr<c10d::Work> finished_;
  std::uint64_t number_ = 0;  // in its group; set by make()

  mutable std::mutex mutex_;
  std::shared_ptr<Registered> registered_;  // guarded by mutex_
};

}  // namespace horon::torch_backend

#endif  // HORON_HAS_WINDOW
