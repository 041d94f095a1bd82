// What a rank knows of the numbers that stand for requests; see Note [Agreement].
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "named/decision.h"

namespace horon {

// Thread safety: none.
class SignatureCache {
 public:
  // The number of this very request; kNoId when it has none.
  RequestId find(const NamedRequest& request, const NamedKey& key) const;
  // Throws Error unless the number is new.
  void define(RequestId id, const RequestPtr& request);
  // Throws Error for a number that was never defined.
  const RequestPtr& request(RequestId id) const;
  // Forgets the requests of a process set that is gone.
  void forget(std::int32_t process_set);
  std::size_t size() const { return requests_.size(); }

 private:
  std::unordered_map<RequestId, RequestPtr> requests_;
  std::unordered_map<std::string, std::vector<RequestId>, NamedKeyHash, NamedKeyEqual>
      ids_;  // by key_of
};

}  // namespace horon
