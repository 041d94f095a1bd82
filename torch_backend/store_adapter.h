// A c10d Store (FileStore, HashStore, TCPStore, a Python one) as the engine's Store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/store.h"

namespace horon::torch_backend {

class StoreAdapter final : public Store {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, const Deadline& deadline) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace horon::torch_backend
