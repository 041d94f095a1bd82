#include "recent_requests.h"

namespace horon::torch_backend {
namespace {

// Names that never come again must not fill the memory.
constexpr std::size_t kMaxRequests = std::size_t{1} << 15;

}  // namespace

RequestPtr RecentRequests::find(std::string_view name, const at::Tensor& tensor, const Reduced& how,
                                int process_set) const {
  const std::lock_guard lock(mutex_);
  const auto found = requests_.find(name);
  if (found == requests_.end()) {
    return nullptr;
  }
  const NamedRequest& request = *found->second;
  const TensorSpec& spec = request.tensors.front();
  const bool is_same = static_cast<int>(request.op) == how.op && request.prescale == how.prescale &&
                       request.postscale == how.postscale && request.priority == how.priority &&
                       request.process_set == process_set &&
                       spec.type_code == static_cast<std::uint8_t>(tensor.scalar_type()) &&
                       tensor.sizes() == at::IntArrayRef(spec.shape);
  return is_same ? found->second : nullptr;
}

void RecentRequests::clear() {
  const std::lock_guard lock(mutex_);
  requests_.clear();
}

void RecentRequests::keep(const RequestPtr& request) {
  const std::lock_guard lock(mutex_);
  if (requests_.size() >= kMaxRequests) {
    requests_.clear();
  }
  requests_[request->name()] = request;
}

}  // namespace horon::torch_backend
