// The key-value store through which the ranks of a group first meet (a c10d Store, or a test's
// map).
#pragma once

#include <cstdint>
#include <string>

#include "core/deadline.h"

namespace horon {

class Store {
 public:
  virtual ~Store() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  // Blocks until the key is there. Throws TimeoutError at the deadline.
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;

  // Adds `amount` to the counter and returns the new value.
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;

  // Called now and then by whoever waits for the others in another way while the ranks meet. Throws
  // when that is no use any more.
  virtual void look_around() {}
};

}  // namespace horon
