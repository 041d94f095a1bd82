#include "named/named_request.h"

#include "core/error.h"

namespace horon {

const char* name(NamedKind kind) {
  switch (kind) {
    case NamedKind::kAllReduce:
      return "ALLREDUCE";
    case NamedKind::kAllGather:
      return "ALLGATHER";
    case NamedKind::kBroadcast:
      return "BROADCAST";
    case NamedKind::kAllToAll:
      return "ALLTOALL";
    case NamedKind::kReduceScatter:
      return "REDUCESCATTER";
    case NamedKind::kBarrier:
      return "BARRIER";
    case NamedKind::kAddProcessSet:
      return "ADD_PROCESS_SET";
    case NamedKind::kRemoveProcessSet:
      return "REMOVE_PROCESS_SET";
    case NamedKind::kJoin:
      return "JOIN";
  }
  return "UNKNOWN";
}

const char* name(NamedOp op) {
  switch (op) {
    case NamedOp::kAverage:
      return "Average";
    case NamedOp::kSum:
      return "Sum";
    case NamedOp::kAdasum:
      return "Adasum";
    case NamedOp::kMin:
      return "Min";
    case NamedOp::kMax:
      return "Max";
    case NamedOp::kProduct:
      return "Product";
  }
  return "Unknown";
}

const char* name(DeviceKind device) { return device == DeviceKind::kCpu ? "CPU" : "GPU"; }

std::uint64_t TensorSpec::elements() const {
  std::uint64_t elements = 1;
  for (const std::int64_t size : shape) {
    elements *= size < 0 ? 1 : static_cast<std::uint64_t>(size);
  }
  return elements;
}

bool is_same(const NamedRequest& a, const NamedRequest& b) {
  if (&a == &b) {
    return true;
  }
  if (a.kind != b.kind || a.op != b.op || a.device != b.device || a.prescale != b.prescale ||
      a.postscale != b.postscale || a.root != b.root || a.process_set != b.process_set ||
      a.priority != b.priority || a.ranks != b.ranks || a.tensors.size() != b.tensors.size()) {
    return false;
  }
  for (std::size_t i = 0; i < a.tensors.size(); ++i) {
    const TensorSpec& x = a.tensors[i];
    const TensorSpec& y = b.tensors[i];
    if (x.dtype != y.dtype || x.type_code != y.type_code || x.element_bytes != y.element_bytes ||
        x.shape != y.shape || x.name != y.name) {
      return false;
    }
  }
  return true;
}

std::string key_of(std::int32_t process_set, const std::string& name) {
  std::string key(reinterpret_cast<const char*>(&process_set), sizeof process_set);
  key += name;
  return key;
}

std::vector<NamedKey> keys_of(const NamedRequest& request) {
  std::vector<NamedKey> keys;
  keys.reserve(request.tensors.size());
  for (const TensorSpec& tensor : request.tensors) {
    keys.emplace_back(key_of(request.process_set, tensor.name));
  }
  return keys;
}

std::int64_t rows_of(std::int64_t rows, int rank, int n_ranks) {
  return rows / n_ranks + (rank < rows % n_ranks ? 1 : 0);
}

std::string describe(const NamedRequest& request) {
  std::string text = concat(name(request.kind), " '", request.name(), "'");
  if (request.tensors.size() > 1) {
    text += concat(" and ", request.tensors.size() - 1, " more");
  }
  return text;
}

}  // namespace horon
