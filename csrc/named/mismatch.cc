#include "named/mismatch.h"

#include <sstream>

#include "core/error.h"

namespace horon {
namespace {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::ostringstream out;
  out << '[';
  for (std::size_t i = 0; i < shape.size(); ++i) {
    out << (i > 0 ? ", " : "");
    shape[i] < 0 ? out << '*' : out << shape[i];
  }
  out << ']';
  return out.str();
}

// "allreduce 'x': <what>: One rank <a> (rank 0), but another rank <b> (rank 1)."
class Mismatch {
 public:
  Mismatch(const NamedRequest& request, int rank_a, int rank_b)
      : request_(request), rank_a_(rank_a), rank_b_(rank_b) {}

  std::string text(const std::string& tensor, const std::string& what, const std::string& verb,
                   const std::string& a, const std::string& b) const {
    return concat("Mismatched ", what, ": One rank ", verb, ' ', a, ", but another rank ", verb,
                  ' ', b, ". (Tensor '", tensor, "': rank ", rank_a_, ' ', verb, ' ', a, ", rank ",
                  rank_b_, ' ', verb, ' ', b, ".)");
  }
  std::string text(const std::string& what, const std::string& verb, const std::string& a,
                   const std::string& b) const {
    return text(request_.name(), what, verb, a, b);
  }

 private:
  const NamedRequest& request_;
  const int rank_a_;
  const int rank_b_;
};

std::string dtype_text(const TensorSpec& tensor) {
  return tensor.dtype == DType::kOpaque ? concat("opaque type ", static_cast<int>(tensor.type_code))
                                        : std::string(name(tensor.dtype));
}

std::string names_text(const NamedRequest& request) {
  std::string text = concat(request.tensors.size(), " tensors (");
  constexpr std::size_t kShown = 4;
  for (std::size_t i = 0; i < request.tensors.size() && i < kShown; ++i) {
    text += (i > 0 ? ", '" : "'") + request.tensors[i].name + "'";
  }
  return text + (request.tensors.size() > kShown ? ", ...)" : ")");
}

std::string ranks_text(const std::vector<std::int32_t>& ranks) {
  std::ostringstream out;
  out << '[';
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    out << (i > 0 ? ", " : "") << ranks[i];
  }
  out << ']';
  return out.str();
}

bool have_same_names(const NamedRequest& a, const NamedRequest& b) {
  for (std::size_t i = 0; i < a.tensors.size(); ++i) {
    if (a.tensors[i].name != b.tensors[i].name) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::optional<std::string> find_mismatch(const NamedRequest& a, int rank_a, const NamedRequest& b,
                                         int rank_b) {
  const Mismatch mismatch(a, rank_a, rank_b);
  const std::string kind = name(a.kind);
  if (a.kind != b.kind) {
    return mismatch.text("operations", "did", concat("an ", kind), concat("an ", name(b.kind)));
  }
  if (a.ranks != b.ranks) {
    return mismatch.text("process sets", "asked for", ranks_text(a.ranks), ranks_text(b.ranks));
  }
  if (a.kind == NamedKind::kRemoveProcessSet && a.root != b.root) {
    return mismatch.text("process sets", "asked for", std::to_string(a.root),
                         std::to_string(b.root));
  }
  if (a.tensors.size() != b.tensors.size() || !have_same_names(a, b)) {
    return mismatch.text("groups", "had", names_text(a), names_text(b));
  }
  if (is_gpu(a.device) != is_gpu(b.device)) {  // kCudaByHost follows from what is compared below
    return mismatch.text(concat(kind, " CPU/GPU device selection"), "specified device",
                         name(a.device), name(b.device));
  }
  for (std::size_t i = 0; i < a.tensors.size(); ++i) {
    const TensorSpec& x = a.tensors[i];
    const TensorSpec& y = b.tensors[i];
    if (x.dtype != y.dtype || x.type_code != y.type_code || x.element_bytes != y.element_bytes) {
      return mismatch.text(x.name, "data types", "had type", dtype_text(x), dtype_text(y));
    }
  }
  if (a.op != b.op) {
    return mismatch.text("reduction operation", "requested", name(a.op), name(b.op));
  }
  if (a.prescale != b.prescale || a.postscale != b.postscale) {
    return mismatch.text("prescale and/or postscale factors", "sent factors",
                         concat('(', a.prescale, ", ", a.postscale, ')'),
                         concat('(', b.prescale, ", ", b.postscale, ')'));
  }
  if (a.root != b.root) {
    return mismatch.text(concat(kind, " root ranks"), "specified root rank", std::to_string(a.root),
                         std::to_string(b.root));
  }
  for (std::size_t i = 0; i < a.tensors.size(); ++i) {
    const TensorSpec& x = a.tensors[i];
    const TensorSpec& y = b.tensors[i];
    if (x.shape != y.shape) {
      return mismatch.text(x.name, concat(kind, " tensor shapes"), "sent a tensor of shape",
                           shape_text(x.shape), shape_text(y.shape));
    }
  }
  return std::nullopt;
}

}  // namespace horon
