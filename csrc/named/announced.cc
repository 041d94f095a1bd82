#include "named/announced.h"

#include <algorithm>
#include <utility>

namespace horon {

void Announced::add(const Operation& operation, RequestId id) {
  if (id == kNoId) {
    by_key_[operation->keys().front().text] = operation;
    return;
  }
  if (id >= by_id_.size()) {
    by_id_.resize(std::max<std::size_t>(2 * by_id_.size(), id + std::size_t{1}));
  }
  by_id_[id] = operation;
  ++n_numbered_;
}

Announced::Operation Announced::take(RequestId id) {
  if (id >= by_id_.size() || !by_id_[id]) {
    return nullptr;
  }
  --n_numbered_;
  return std::exchange(by_id_[id], nullptr);
}

Announced::Operation Announced::take(std::string_view key) {
  const auto found = by_key_.find(key);
  if (found != by_key_.end()) {
    Operation operation = std::move(found->second);
    by_key_.erase(found);
    return operation;
  }
  // Announced by its number, and failed, or agreed on under another: rare.
  const auto numbered = std::find_if(by_id_.begin(), by_id_.end(), [&](const Operation& one) {
    return one && one->keys().front().text == key;
  });
  return numbered == by_id_.end() ? nullptr
                                  : take(static_cast<RequestId>(numbered - by_id_.begin()));
}

std::vector<Announced::Operation> Announced::take_all() {
  std::vector<Operation> all;
  all.reserve(by_key_.size() + n_numbered_);
  for (auto& [key, operation] : by_key_) {
    all.push_back(std::move(operation));
  }
  by_key_.clear();
  for (Operation& operation : by_id_) {
    if (operation) {
      all.push_back(std::move(operation));
    }
  }
  by_id_.clear();
  n_numbered_ = 0;
  return all;
}

}  // namespace horon
