// NCCL's functions that use communicators, and all the rest.
#include <cstring>
#include <mutex>
#include <string>

#include "last_error.h"
#include "nccl_group.h"
#include "nccl_reduce.h"

namespace horon::simulator {
namespace {

struct LastText {
  std::mutex mutex;
  std::string text;  // guarded by mutex

  static LastText& get() {
    static auto* const last = new LastText;
    return *last;
  }
};

// A group of one call, or part of the group around it.
ncclResult_t enqueue(ncclComm_t comm, Operation operation, cudaStream_t handle) {
  begin_group();
  if (check_ready(comm) != ncclSuccess) {
    return end_group();
  }
  const int before = current_device();
  set_current_device(comm->communicator->device());  // for the default streams
  operation.stream = find_stream(handle);
  set_current_device(before);
  const int peer = operation.root;
  const bool is_known = operation.dtype >= 0 && operation.dtype < ncclNumTypes && peer >= 0 &&
                        peer < comm->communicator->n_ranks() &&
                        comm->communicator->resolve_operator(operation);
  if (!is_known) {
    fail_group(ncclInvalidArgument, "invalid dtype, operator, root or peer");
  } else if (operation.stream == nullptr ||
             operation.stream->device != comm->communicator->device()) {
    fail_group(ncclUnhandledCudaError, "the stream is not one of the communicator's device");
  } else {
    add_operation(comm, std::move(operation));
  }
  const ncclResult_t result = end_group();
  return is_known ? result : ncclInvalidArgument;
}

Operation call(Function function, const void* send, void* recv, std::size_t count,
               ncclDataType_t dtype) {
  return {.function = function,
          .send = static_cast<const std::byte*>(send),
          .recv = static_cast<std::byte*>(recv),
          .count = count,
          .dtype = dtype,
          .host_scalar = {}};
}

Operation with_root(Operation operation, int root) {
  operation.root = root;
  return operation;
}

Operation with_op(Operation operation, ncclRedOp_t op) {
  operation.op = op;
  return operation;
}

}  // namespace

void set_last_nccl_error(const std::string& text) {
  LastText& last = LastText::get();
  const std::lock_guard lock(last.mutex);
  last.text = text;
}

}  // namespace horon::simulator

using namespace horon::simulator;

HORON_SIMULATOR_EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

HORON_SIMULATOR_EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

HORON_SIMULATOR_EXPORT const char* ncclGetLastError(ncclComm_t /*comm*/) {
  thread_local std::string text;
  LastText& last = LastText::get();
  const std::lock_guard lock(last.mutex);
  text = last.text;
  return text.c_str();
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  if (!is_handle(comm)) {
    return fail_group(ncclInvalidArgument, "ncclCommGetAsyncError: no communicator");
  }
  *state = comm->communicator->state();
  return ncclSuccess;
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  const ncclResult_t ready = check_ready(comm);
  *count = ready == ncclSuccess ? comm->communicator->n_ranks() : 0;
  return ready;
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  const ncclResult_t ready = check_ready(comm);
  *rank = ready == ncclSuccess ? comm->communicator->rank() : -1;
  return ready;
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  const ncclResult_t ready = check_ready(comm);
  *device = ready == ncclSuccess ? comm->communicator->device() : -1;
  return ready;
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclGroupStart() {
  begin_group();
  return ncclSuccess;
}
HORON_SIMULATOR_EXPORT ncclResult_t ncclGroupEnd() { return end_group(); }

HORON_SIMULATOR_EXPORT ncclResult_t ncclAllReduce(const void* send, void* recv, std::size_t count,
                                                  ncclDataType_t dtype, ncclRedOp_t op,
                                                  ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, with_op(call(Function::kAllReduce, send, recv, count, dtype), op), stream);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclBroadcast(const void* send, void* recv, std::size_t count,
                                                  ncclDataType_t dtype, int root, ncclComm_t comm,
                                                  cudaStream_t stream) {
  return enqueue(comm, with_root(call(Function::kBroadcast, send, recv, count, dtype), root),
                 stream);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclBcast(void* buffer, std::size_t count, ncclDataType_t dtype,
                                              int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, dtype, root, comm, stream);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclReduce(const void* send, void* recv, std::size_t count,
                                               ncclDataType_t dtype, ncclRedOp_t op, int root,
                                               ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm,
                 with_op(with_root(call(Function::kReduce, send, recv, count, dtype), root), op),
                 stream);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclAllGather(const void* send, void* recv, std::size_t count,
                                                  ncclDataType_t dtype, ncclComm_t comm,
                                                  cudaStream_t stream) {
  return enqueue(comm, call(Function::kAllGather, send, recv, count, dtype), stream);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclReduceScatter(const void* send, void* recv,
                                                      std::size_t count, ncclDataType_t dtype,
                                                      ncclRedOp_t op, ncclComm_t comm,
                                                      cudaStream_t stream) {
  return enqueue(comm, with_op(call(Function::kReduceScatter, send, recv, count, dtype), op),
                 stream);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclAlltoAll(const void* send, void* recv, std::size_t count,
                                                 ncclDataType_t dtype, ncclComm_t comm,
                                                 cudaStream_t stream) {
  return enqueue(comm, call(Function::kAllToAll, send, recv, count, dtype), stream);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclGather(const void* send, void* recv, std::size_t count,
                                               ncclDataType_t dtype, int root, ncclComm_t comm,
                                               cudaStream_t stream) {
  return enqueue(comm, with_root(call(Function::kGather, send, recv, count, dtype), root), stream);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclScatter(const void* send, void* recv, std::size_t count,
                                                ncclDataType_t dtype, int root, ncclComm_t comm,
                                                cudaStream_t stream) {
  return enqueue(comm, with_root(call(Function::kScatter, send, recv, count, dtype), root), stream);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclSend(const void* send, std::size_t count,
                                             ncclDataType_t dtype, int peer, ncclComm_t comm,
                                             cudaStream_t stream) {
  return enqueue(comm, with_root(call(Function::kSend, send, nullptr, count, dtype), peer), stream);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclRecv(void* recv, std::size_t count, ncclDataType_t dtype,
                                             int peer, ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, with_root(call(Function::kRecv, nullptr, recv, count, dtype), peer), stream);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar,
                                                             ncclDataType_t dtype,
                                                             ncclScalarResidence_t residence,
                                                             ncclComm_t comm) {
  if (const ncclResult_t ready = check_ready(comm); ready != ncclSuccess) {
    return ready;
  }
  const auto* at = static_cast<const std::byte*>(scalar);
  if (residence == ncclScalarHostImmediate) {
    *op = comm->communicator->add_operator({nullptr, Bytes(at, at + element_bytes(dtype))});
  } else {
    *op = comm->communicator->add_operator({at, {}});
  }
  return ncclSuccess;
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  if (!is_handle(comm) || !comm->communicator->remove_operator(op)) {
    return fail_group(ncclInvalidArgument, "ncclRedOpDestroy: no such operator");
  }
  return ncclSuccess;
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclMemAlloc(void** pointer, std::size_t bytes) {
  return cudaMalloc(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclMemFree(void* pointer) {
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// Registration makes real NCCL faster, and changes nothing here.
HORON_SIMULATOR_EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer,
                                                     std::size_t /*bytes*/, void** handle) {
  *handle = buffer;
  return check_ready(comm);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* /*handle*/) {
  return is_handle(comm) ? ncclSuccess : ncclInvalidArgument;
}
