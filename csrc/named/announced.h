// What this rank has announced, and has not been agreed on.
#pragma once

#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "named/decision.h"
#include "named/named_operation.h"

namespace horon {

// Found by the number of its request if it has one, which costs no look at its name, or else by the
// key of its first tensor.
//
// Thread safety: none.
class Announced {
 public:
  using Operation = std::shared_ptr<NamedOperation>;

  // Requires: operation->keys(), and that no other operation has that key.
  void add(const Operation& operation, RequestId id);
  // Removes and returns it; null if it is not there.
  Operation take(RequestId id);
  Operation take(std::string_view key);
  bool empty() const { return n_numbered_ == 0 && by_key_.empty(); }
  // Removes and returns all.
  std::vector<Operation> take_all();

 private:
  std::vector<Operation> by_id_;  // null where nothing is announced
  std::size_t n_numbered_ = 0;
  std::unordered_map<std::string_view, Operation> by_key_;  // views of the operations' own keys
};

}  // namespace horon
