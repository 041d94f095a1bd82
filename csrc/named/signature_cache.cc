#include "named/signature_cache.h"

#include "core/error.h"

namespace horon {

RequestId SignatureCache::find(const NamedRequest& request, const NamedKey& key) const {
  const auto found = ids_.find(key);
  if (found != ids_.end()) {
    for (const RequestId id : found->second) {
      if (is_same(*requests_.at(id), request)) {
        return id;
      }
    }
  }
  return kNoId;
}

void SignatureCache::define(RequestId id, const RequestPtr& request) {
  const bool is_new = requests_.emplace(id, request).second;
  HORON_CHECK(is_new, "request number ", id, " was defined twice");
  ids_[key_of(*request)].push_back(id);
}

const RequestPtr& SignatureCache::request(RequestId id) const {
  const auto found = requests_.find(id);
  HORON_CHECK(found != requests_.end(), "unknown request number ", id);
  return found->second;
}

void SignatureCache::forget(std::int32_t process_set) {
  for (auto entry = requests_.begin(); entry != requests_.end();) {
    if (entry->second->process_set == process_set) {
      ids_.erase(key_of(*entry->second));
      entry = requests_.erase(entry);
    } else {
      ++entry;
    }
  }
}

}  // namespace horon
