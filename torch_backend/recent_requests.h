// Requests that were made before: a name usually comes again with the same tensor.
#pragma once

#include <ATen/ATen.h>

#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "named_operation_builder.h"

namespace horon::torch_backend {

// Thread safety: all methods.
class RecentRequests {
 public:
  // What was kept for an all-reduce of such a tensor under this name; null if there is none.
  RequestPtr find(std::string_view name, const at::Tensor& tensor, const Reduced& how,
                  int process_set) const;
  void keep(const RequestPtr& request);
  void clear();

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>()(text);
    }
  };

  mutable std::mutex mutex_;
  // By name. Guarded by mutex_.
  std::unordered_map<std::string, RequestPtr, Hash, std::equal_to<>> requests_;
};

}  // namespace horon::torch_backend
