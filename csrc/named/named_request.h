// What a rank announces: an operation that is known by its name and not by its place in an order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "named/named_key.h"

namespace horon {

// The values travel between ranks: append only.
enum class NamedKind : std::uint8_t {
  kAllReduce,
  kAllGather,
  kBroadcast,
  kAllToAll,
  kReduceScatter,
  kBarrier,
  kAddProcessSet,
  kRemoveProcessSet,
  kJoin,
};
inline constexpr int kNamedKindCount = 9;

// Horovod's codes.
enum class NamedOp : std::uint8_t { kAverage, kSum, kAdasum, kMin, kMax, kProduct };
inline constexpr int kNamedOpCount = 6;

enum class DeviceKind : std::uint8_t {
  kCpu,
  kCuda,
  kCudaByHost,  // CUDA tensors that are copied to the host for what a GPU can not do
};
inline constexpr int kDeviceKindCount = 3;
constexpr bool is_gpu(DeviceKind device) { return device != DeviceKind::kCpu; }

// "ALLREDUCE", as Horovod's messages spell it.
const char* name(NamedKind kind);
// "Average".
const char* name(NamedOp op);
// "CPU".
const char* name(DeviceKind device);

struct TensorSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  // torch's own code of the type and its size: opaque types share one DType.
  std::uint8_t type_code = 0;
  std::uint8_t element_bytes = 4;
  // Where ranks may differ in the first dimension (allgather, alltoall), it is left out (-1).
  std::vector<std::int64_t> shape;

  std::uint64_t elements() const;
  std::uint64_t bytes() const { return elements() * element_bytes; }
};

// Immutable once announced, and shared between queue, cache and agreement.
struct NamedRequest {
  NamedKind kind = NamedKind::kAllReduce;
  NamedOp op = NamedOp::kSum;
  DeviceKind device = DeviceKind::kCpu;
  double prescale = 1.0;
  double postscale = 1.0;
  std::int32_t root = 0;  // a global rank; the id where a process set is removed
  std::int32_t process_set = 0;
  std::int32_t priority = 0;  // smaller: wanted earlier
  // At least one. Several: a group, which is agreed and fails as a whole.
  std::vector<TensorSpec> tensors;
  // Of the process set to be added.
  std::vector<std::int32_t> ranks;
  // keys_of() it, if whoever made the request expects to use it again; else empty. Does not travel.
  std::vector<NamedKey> keys;

  // A group is known by the name of its first tensor.
  const std::string& name() const { return tensors.front().name; }
};

using RequestPtr = std::shared_ptr<const NamedRequest>;

// Whether two ranks may announce these for one operation, and get the same priority.
bool is_same(const NamedRequest& a, const NamedRequest& b);

inline std::string key_of(const NamedRequest& request) {
  return key_of(request.process_set, request.name());
}
// Of all tensors.
std::vector<NamedKey> keys_of(const NamedRequest& request);

// "ALLREDUCE 'x' and 3 more".
std::string describe(const NamedRequest& request);

// Of a process set of `n_ranks` in a reduce-scatter of `rows` rows: the first ranks get one more.
std::int64_t rows_of(std::int64_t rows, int rank, int n_ranks);

}  // namespace horon
