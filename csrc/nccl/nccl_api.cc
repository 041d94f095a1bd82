#include "nccl/nccl_api.h"

#include <nccl.h>

#include <cstring>

namespace horon {
namespace {

// The enums cross the seam by a cast.
static_assert(static_cast<int>(NcclResult::kSuccess) == ncclSuccess);
static_assert(static_cast<int>(NcclResult::kUnhandledCudaError) == ncclUnhandledCudaError);
static_assert(static_cast<int>(NcclResult::kSystemError) == ncclSystemError);
static_assert(static_cast<int>(NcclResult::kInternalError) == ncclInternalError);
static_assert(static_cast<int>(NcclResult::kInvalidArgument) == ncclInvalidArgument);
static_assert(static_cast<int>(NcclResult::kInvalidUsage) == ncclInvalidUsage);
static_assert(static_cast<int>(NcclResult::kRemoteError) == ncclRemoteError);
static_assert(static_cast<int>(NcclResult::kInProgress) == ncclInProgress);
static_assert(static_cast<int>(NcclDataType::kInt8) == ncclInt8);
static_assert(static_cast<int>(NcclDataType::kUint8) == ncclUint8);
static_assert(static_cast<int>(NcclDataType::kInt32) == ncclInt32);
static_assert(static_cast<int>(NcclDataType::kUint32) == ncclUint32);
static_assert(static_cast<int>(NcclDataType::kInt64) == ncclInt64);
static_assert(static_cast<int>(NcclDataType::kUint64) == ncclUint64);
static_assert(static_cast<int>(NcclDataType::kFloat16) == ncclFloat16);
static_assert(static_cast<int>(NcclDataType::kFloat32) == ncclFloat32);
static_assert(static_cast<int>(NcclDataType::kFloat64) == ncclFloat64);
static_assert(static_cast<int>(NcclDataType::kBfloat16) == ncclBfloat16);
static_assert(static_cast<int>(NcclDataType::kFloat8E4M3) == ncclFloat8e4m3);
static_assert(static_cast<int>(NcclDataType::kFloat8E5M2) == ncclFloat8e5m2);
static_assert(static_cast<int>(NcclReduceOp::kSum) == ncclSum);
static_assert(static_cast<int>(NcclReduceOp::kProduct) == ncclProd);
static_assert(static_cast<int>(NcclReduceOp::kMax) == ncclMax);
static_assert(static_cast<int>(NcclReduceOp::kMin) == ncclMin);
static_assert(static_cast<int>(NcclReduceOp::kAvg) == ncclAvg);
static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));

NcclResult from(ncclResult_t result) { return static_cast<NcclResult>(result); }
ncclDataType_t to(NcclDataType dtype) { return static_cast<ncclDataType_t>(dtype); }
ncclRedOp_t to(NcclReduceOp op) { return static_cast<ncclRedOp_t>(op); }

ncclUniqueId to(const NcclUniqueId& id) {
  ncclUniqueId result;
  std::memcpy(&result, id.bytes.data(), sizeof result);
  return result;
}

// Points into `config`, which must outlive it.
ncclConfig_t to(const NcclConfig& config) {
  ncclConfig_t result = NCCL_CONFIG_INITIALIZER;
  result.blocking = config.is_blocking ? 1 : 0;
  if (config.min_blocks > 0) {
    result.minCTAs = config.min_blocks;
  }
  if (config.max_blocks > 0) {
    result.maxCTAs = config.max_blocks;
  }
  result.splitShare = config.shares_resources_of_parent ? 1 : 0;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  if (!config.name.empty()) {
    result.commName = config.name.c_str();
  }
#endif
  return result;
}

class SystemNccl final : public NcclApi {
 public:
  int version() override {
    int version = 0;
    return ncclGetVersion(&version) == ncclSuccess ? version : 0;
  }
  std::string error_text(NcclResult result) override {
    return ncclGetErrorString(static_cast<ncclResult_t>(result));
  }
  std::string last_error(NcclCommHandle comm) override {
    const char* text = ncclGetLastError(comm);
    return text == nullptr ? "" : text;
  }

  NcclResult get_unique_id(NcclUniqueId* id) override {
    ncclUniqueId made;
    const ncclResult_t result = ncclGetUniqueId(&made);
    std::memcpy(id->bytes.data(), &made, sizeof made);
    return from(result);
  }
  NcclResult comm_init(NcclCommHandle* comm, int n_ranks, const NcclUniqueId& id, int rank,
                       const NcclConfig& config) override {
    ncclConfig_t nccl_config = to(config);
    return from(ncclCommInitRankConfig(comm, n_ranks, to(id), rank, &nccl_config));
  }
  NcclResult comm_split(NcclCommHandle comm, int color, int key, NcclCommHandle* child,
                        const NcclConfig& config) override {
    ncclConfig_t nccl_config = to(config);
    return from(
        ncclCommSplit(comm, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, child, &nccl_config));
  }
  NcclResult comm_shrink([[maybe_unused]] NcclCommHandle comm,
                         [[maybe_unused]] const std::vector<int>& excluded_ranks,
                         [[maybe_unused]] bool aborts_parent,
                         [[maybe_unused]] NcclCommHandle* child,
                         [[maybe_unused]] const NcclConfig& config) override {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    ncclConfig_t nccl_config = to(config);
    std::vector<int> excluded = excluded_ranks;  // NCCL wants it writable
    return from(ncclCommShrink(comm, excluded.data(), static_cast<int>(excluded.size()), child,
                               &nccl_config,
                               aborts_parent ? NCCL_SHRINK_ABORT : NCCL_SHRINK_DEFAULT));
#else
    return NcclResult::kInvalidUsage;
#endif
  }
  NcclResult comm_finalize(NcclCommHandle comm) override { return from(ncclCommFinalize(comm)); }
  NcclResult comm_destroy(NcclCommHandle comm) override { return from(ncclCommDestroy(comm)); }
  NcclResult comm_abort(NcclCommHandle comm) override { return from(ncclCommAbort(comm)); }
  NcclResult comm_async_error(NcclCommHandle comm, NcclResult* error) override {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(comm, &state);
    *error = from(state);
    return from(result);
  }
  NcclResult comm_count(NcclCommHandle comm, int* n_ranks) override {
    return from(ncclCommCount(comm, n_ranks));
  }
  NcclResult comm_rank(NcclCommHandle comm, int* rank) override {
    return from(ncclCommUserRank(comm, rank));
  }

  NcclResult group_start() override { return from(ncclGroupStart()); }
  NcclResult group_end() override { return from(ncclGroupEnd()); }

  NcclResult all_reduce(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                        NcclReduceOp op, NcclCommHandle comm, StreamHandle stream) override {
    return from(ncclAllReduce(send, recv, count, to(dtype), to(op), comm, stream));
  }
  NcclResult broadcast(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                       int root, NcclCommHandle comm, StreamHandle stream) override {
    return from(ncclBroadcast(send, recv, count, to(dtype), root, comm, stream));
  }
  NcclResult reduce(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                    NcclReduceOp op, int root, NcclCommHandle comm, StreamHandle stream) override {
    return from(ncclReduce(send, recv, count, to(dtype), to(op), root, comm, stream));
  }
  NcclResult all_gather(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                        NcclCommHandle comm, StreamHandle stream) override {
    return from(ncclAllGather(send, recv, count, to(dtype), comm, stream));
  }
  NcclResult reduce_scatter(const void* send, void* recv, std::size_t count, NcclDataType dtype,
                            NcclReduceOp op, NcclCommHandle comm, StreamHandle stream) override {
    return from(ncclReduceScatter(send, recv, count, to(dtype), to(op), comm, stream));
  }
  NcclResult send(const void* send, std::size_t count, NcclDataType dtype, int peer,
                  NcclCommHandle comm, StreamHandle stream) override {
    return from(ncclSend(send, count, to(dtype), peer, comm, stream));
  }
  NcclResult recv(void* recv, std::size_t count, NcclDataType dtype, int peer, NcclCommHandle comm,
                  StreamHandle stream) override {
    return from(ncclRecv(recv, count, to(dtype), peer, comm, stream));
  }

  NcclResult create_premul_sum(NcclReduceOp* op, const void* factor, NcclDataType dtype,
                               NcclCommHandle comm) override {
    ncclRedOp_t made = ncclSum;
    const ncclResult_t result = ncclRedOpCreatePreMulSum(&made, const_cast<void*>(factor),
                                                         to(dtype), ncclScalarHostImmediate, comm);
    *op = static_cast<NcclReduceOp>(made);
    return from(result);
  }
  NcclResult destroy_op(NcclReduceOp op, NcclCommHandle comm) override {
    return from(ncclRedOpDestroy(to(op), comm));
  }
};

}  // namespace

std::unique_ptr<NcclApi> make_nccl_api() { return std::make_unique<SystemNccl>(); }

}  // namespace horon
