// A c10d Store (FileStore, HashStore, TCPStore, a Python one) as the engine's Store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>

#include "core/store.h"

namespace horon::torch_backend {

class StoreAdapter final : public Store {
 public:
  // `check` is called about every second while a key is waited for; throws to give up.
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store, std::function<void()> check = {})
      : store_(std::move(store)), check_(std::move(check)) {}

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, const Deadline& deadline) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;
  // Sets a key that is not there yet. What it holds then: `value`, or what somebody else has set.
  std::string set_first(const std::string& key, const std::string& value);
  // Ctrl-C, and `check`.
  void look_around() override;

 private:
  template <typename Call>
  auto ask(const Call& call);
  // `deadline` is for stores that can only wait.
  bool is_there(const std::string& key, const Deadline& deadline);
  void wait_in_slices(const std::string& key, const Deadline& deadline);
  // Not in vain if the key has come meanwhile.
  void look_around_for(const std::string& key);
  bool comes_soon(const std::string& key);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::function<void()> check_;
};

}  // namespace horon::torch_backend
