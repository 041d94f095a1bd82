// The seam over NCCL's API: one method for each function that is used. Two exist: NCCL itself
// (make_nccl_api), and the tests' fake, so that everything above is tested without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "nccl/nccl_types.h"

namespace horon {

// Thread safety: NCCL's. A communicator belongs to one thread at a time, but for comm_async_error
// and comm_abort. Groups are per thread.
class NcclApi {
 public:
  virtual ~NcclApi() = default;

  // As NCCL_VERSION_CODE: 23007 for 2.30.7.
  virtual int version() = 0;
  virtual std::string error_text(NcclResult result) = 0;
  // What NCCL last complained about; null: in this thread.
  virtual std::string last_error(NcclCommHandle comm) = 0;

  virtual NcclResult get_unique_id(NcclUniqueId* id) = 0;
  virtual NcclResult comm_init(NcclCommHandle* comm, int n_ranks, const NcclUniqueId& id, int rank,
                               const NcclConfig& config) = 0;
  // A negative color: no child, *child stays null. *child may be written until the parent is ready.
  virtual NcclResult comm_split(NcclCommHandle comm, int color, int key, NcclCommHandle* child,
                                const NcclConfig& config) = 0;
  // kInvalidUsage where this NCCL has no shrink (before 2.27). *child as above.
  virtual NcclResult comm_shrink(NcclCommHandle comm, const std::vector<int>& excluded_ranks,
                                 bool aborts_parent, NcclCommHandle* child,
                                 const NcclConfig& config) = 0;
  virtual NcclResult comm_finalize(NcclCommHandle comm) = 0;
  virtual NcclResult comm_destroy(NcclCommHandle comm) = 0;
  virtual NcclResult comm_abort(NcclCommHandle comm) = 0;
  virtual NcclResult comm_async_error(NcclCommHandle comm, NcclResult* error) = 0;
  virtual NcclResult comm_count(NcclCommHandle comm, int* n_ranks) = 0;
  virtual NcclResult comm_rank(NcclCommHandle comm, int* rank) = 0;

  virtual NcclResult group_start() = 0;
  virtual NcclResult group_end() = 0;

  virtual NcclResult all_reduce(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                                NcclReduceOp op, NcclCommHandle comm, StreamHandle stream) = 0;
  virtual NcclResult broadcast(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                               int root, NcclCommHandle comm, StreamHandle stream) = 0;
  virtual NcclResult reduce(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                            NcclReduceOp op, int root, NcclCommHandle comm,
                            StreamHandle stream) = 0;
  // `count`: of each rank.
  virtual NcclResult all_gather(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                                NcclCommHandle comm, StreamHandle stream) = 0;
  virtual NcclResult reduce_scatter(const void* send, void* recv, std::size_t count,
                                    NcclDataType dtype, NcclReduceOp op, NcclCommHandle comm,
                                    StreamHandle stream) = 0;
  virtual NcclResult send(const void* send, std::size_t count, NcclDataType dtype, int peer,
                          NcclCommHandle comm, StreamHandle stream) = 0;
  virtual NcclResult recv(void* recv, std::size_t count, NcclDataType dtype, int peer,
                          NcclCommHandle comm, StreamHandle stream) = 0;

  // `factor` points at one element of the dtype, in host memory; it is read before the return.
  virtual NcclResult create_premul_sum(NcclReduceOp* op, const void* factor, NcclDataType dtype,
                                       NcclCommHandle comm) = 0;
  // Allowed as soon as the last call that uses the op has returned.
  virtual NcclResult destroy_op(NcclReduceOp op, NcclCommHandle comm) = 0;
};

// NCCL itself. Only in builds with the GPU parts.
std::unique_ptr<NcclApi> make_nccl_api();

}  // namespace horon
