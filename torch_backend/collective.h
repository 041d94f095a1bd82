// One c10d call, made ready for the engine: requests, and the tensors behind them.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/function_ref.h"
#include "core/request.h"
#include "later_requests.h"
#include "named/part_maker.h"

namespace horon::torch_backend {

struct Collective {
  // Executed one after another, in one turn of the lane. More than one for coalesced calls.
  std::vector<Request> requests;
  // More of them, where they depend on what these bring.
  std::shared_ptr<LaterRequests> later;
  // The requests are parts of one tensor, which this may be making meanwhile; null: it is made.
  bool is_in_parts = false;
  std::shared_ptr<PartMaker> maker;
  // What the requests point into.
  std::vector<at::Tensor> kept_alive;
  // Contents that travel from a contiguous stand-in: (the stand-in, the user's tensor).
  std::vector<std::pair<at::Tensor, at::Tensor>> copy_in;
  // Results that went to a contiguous stand-in: (the user's tensor, the stand-in).
  std::vector<std::pair<at::Tensor, at::Tensor>> copy_back;
  // The user's inputs, for the profiler, and outputs, for Work::result and the future's value.
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  // Where all tensors are; nothing for a barrier.
  std::optional<at::Device> device;

  bool is_cuda() const { return device && device->is_cuda(); }

  // Whether running its one request is all there is to do.
  bool is_plain() const {
    return requests.size() == 1 && !is_in_parts && copy_in.empty() && copy_back.empty() &&
           later == nullptr;
  }

  // Fills the stand-ins with what the user's tensors hold now, since an earlier operation may still
  // have been writing them before its turn; then has the requests run.
  void run(FunctionRef<void(const Request&)> run_one);
  // Writes results into the user's tensors. After run().
  void finish();

  // The first part of run().
  void prepare();
};

// A dense CPU tensor, contiguous, not lazily conjugated or negated: memory as the engine wants it.
bool is_plain_cpu(const at::Tensor& tensor);

// Throws a clear error unless the tensor is dense, in memory, and on a device that this build
// carries.
void check_tensor(const at::Tensor& tensor, OpKind kind);
// The part of it about the device.
void check_device(const at::Tensor& tensor, const char* operation);
// The same for a tensor that will be written: elements must not share memory.
void check_writable(const at::Tensor& tensor, OpKind kind);
// The part of it about the elements.
void check_elements_apart(const at::Tensor& tensor, const char* operation);

// Adds a contiguous, readable form of `tensor` to the collective and returns a view of it, to be
// read after prepare(). Throws where other tensors of the collective are on another device.
ConstSpan stage_input(Collective& collective, const at::Tensor& tensor);
// The same for a tensor to be written; `keep_contents` when it is read as well.
Span stage_output(Collective& collective, const at::Tensor& tensor, bool keep_contents);
// The same for a tensor whose memory other tensors of the call share: all inputs are read before it
// changes.
Span stage_output_apart(Collective& collective, const at::Tensor& tensor, bool keep_contents);

// Where a contiguous tensor lies.
ConstSpan memory_of(const at::Tensor& tensor);

}  // namespace horon::torch_backend
