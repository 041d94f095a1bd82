// Which parameters' gradients belong where, and what has been lent; see Note [Gradients in their
// places] in gradient_places.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/allocation_habit.h"
#include "gradient_loan.h"
#include "gradient_pack.h"
#include "gradient_places.h"

namespace horon::torch_backend {

// Something that a node of a backward pass allocates, of the size of gradients that it makes.
struct GradientRequest {
  std::size_t bytes;
  c10::Device device;
  int graph_task;
  // Among those of the same size that the node has made since it runs: 0, 1, ... by one that makes
  // gradients, -1, -2, ... by the one that stores a gradient, which may copy it.
  int number;
};

// Where a parameter's gradient belongs. What changes of it is guarded by its table.
struct GradientPlace {
  const GradientPlaces* model = nullptr;
  std::size_t index = 0;  // of the parameter, for the model
  // With DDP it has the hook that settles its gradients.
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
  at::Tensor part;                     // of DDP's bucket, or
  std::shared_ptr<GradientPack> pack;  // in the memory that it has at the moment
  std::size_t index_in_pack = 0;
  std::size_t bytes = 0;
  c10::Device device{c10::kCPU};
  std::shared_ptr<GradientLoan> loan;  // of the pack, which has others
  AllocationHabit habit;
  int set_in = -1;      // the backward pass, of which only a part comes by
  int graph_task = -1;  // the last one that came by, and how many of its nodes did
  int n_nodes = 0;
  int passed_by = -1;   // the last one with a node that is not the one that is waited for
  bool is_used = true;  // false: it was forgotten, or has got a successor
  // Something else than a gradient of that size and model was in its place, or somebody has kept an
  // own one.
  bool is_misfit = false;
  // What an own gradient that was made there lies in; see Note [Own gradients] in own_gradients.h.
  c10::weak_intrusive_ptr<c10::StorageImpl> own{c10::intrusive_ptr<c10::StorageImpl>()};

  void* address() const { return pack ? pack->address(index_in_pack) : part.mutable_data_ptr(); }
};

// All places of this process. Thread safety: all methods.
class GradientPlaceTable {
 public:
  using Accumulator = torch::autograd::AccumulateGrad;
  using Parameter = const c10::TensorImpl*;

  void set(Parameter parameter, std::shared_ptr<GradientPlace> place);
  void forget(const GradientPlaces* model);

  // False: there is no place of that size. True: there may be one. Without the lock.
  bool may_have_size(std::size_t bytes, c10::DeviceType type) const {
    const Sizes& sizes = type == c10::kCPU ? on_cpu_ : on_gpu_;
    return (sizes.words[word_of(bytes)].load(std::memory_order_relaxed) & bit_of(bytes)) != 0;
  }

  // What a node allocates for the parameter's gradient, to be asked for once by each that may;
  // without a place if nothing of it matters.
  struct Expected {
    std::shared_ptr<GradientPlace> place;
    std::size_t bytes = 0;
    int node = 0;               // which of those that asked in this pass
    std::optional<int> number;  // nothing: any that is seen
  };
  Expected expected(const Accumulator& accumulator, int graph_task);

  // The place, if the request is for its gradient.
  struct Answer {
    c10::DataPtr lent;                           // null: none
    bool is_onlooker = false;                    // wants to see where it is made instead
    std::shared_ptr<GradientPlaces::Owner> ask;  // has to begin the step before it can be lent
  };
  Answer lend(GradientPlace& place, int node, const GradientRequest& request);
  // What was not lent was made there.
  void see(GradientPlace& place, int node, const GradientRequest& request, const void* address);

  // What has become the parameter's gradient in this backward pass.
  void learn(Parameter parameter, const at::Tensor& gradient);

  // A gradient that is about to be stored, and belongs into DDP's bucket: returns it, or what it
  // becomes.
  at::Tensor settle(Parameter parameter, const at::Tensor& gradient);

  // See GradientPlaces.
  void begin_pass(const GradientPlaces* model);
  void end_pass(const GradientPlaces* model);
  bool is_misplaced(const GradientPlaces* model, Parameter parameter, const at::Tensor& gradient);
  void give_way(const GradientPlaces* model, Parameter parameter);

  // See leave_place() in gradient_places.h.
  c10::Storage leave(GradientLoan& loan);

  // See gradient_places.h.
  void forsake(const GradientPack& pack);

 private:
  using SharedPlace = std::shared_ptr<GradientPlace>;

  // A bit for each size that a place has, and for some that none has.
  struct Sizes {
    std::array<std::atomic<std::uint64_t>, 16> words{};
  };
  static std::size_t hash_of(std::size_t bytes) {
    return static_cast<std::size_t>((std::uint64_t{bytes} * 0x9E3779B97F4A7C15U) >> 54U);
  }
  static std::size_t word_of(std::size_t bytes) { return hash_of(bytes) / 64; }
  static std::uint64_t bit_of(std::size_t bytes) {
    return std::uint64_t{1} << (hash_of(bytes) % 64);
  }

  // What has to die after the lock.
  template <typename Predicate>
  std::vector<SharedPlace> take_out(Predicate is_wanted);

  // These require the lock.
  static void learn(GradientPlace& place, const at::Tensor& gradient);
  void note_misfit(const GradientPlace& place);
  // Gives the place's bucket other memory. Returns the old one, which what is lent there keeps.
  c10::Storage leave_memory(const GradientPlace& place);
  // The same in a backward pass.
  void move_away(const GradientPlace& place);
  // See begin_pass() in gradient_places.h.
  void leave_to_keepers(const GradientPlaces* model);

  SharedPlace place_of(const GradientPlaces* model, Parameter parameter) const;
  void add_size(const GradientPlace& place);

  Sizes on_cpu_;
  Sizes on_gpu_;
  std::mutex mutex_;
  // All of these, and what changes of a place, guarded by mutex_.
  std::unordered_map<Parameter, SharedPlace> places_;
  std::set<std::pair<const GradientPlaces*, std::size_t>> misfits_;
  std::map<const GradientPlaces*, std::vector<c10::Storage>> left_behind_;
  std::set<const GradientPlaces*> begun_;  // of own gradients, those in a pass
};

}  // namespace horon::torch_backend
