// A part of a store: keys with something in front.
#pragma once

#include <string>
#include <utility>

#include "core/store.h"

namespace horon {

// Ownership: `store` outlives it.
class PrefixedStore final : public Store {
 public:
  PrefixedStore(std::string prefix, Store& store) : prefix_(std::move(prefix)), store_(store) {}

  void set(const std::string& key, const std::string& value) override {
    store_.set(prefix_ + key, value);
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    return store_.get(prefix_ + key, deadline);
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return store_.add(prefix_ + key, amount);
  }
  void look_around() override { store_.look_around(); }

 private:
  const std::string prefix_;
  Store& store_;
};

}  // namespace horon
