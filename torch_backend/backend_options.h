// What a user can pass as pg_options, and what a backend tells about itself.
#pragma once

#include <cstdint>
#include <vector>

#include "compat.h"
#include "core/options.h"

namespace horon::torch_backend {

inline constexpr const char* kBackendName = "horon";

// Ranks as the engine counts them.
inline std::vector<int> to_ints(const std::vector<uint64_t>& ranks) {
  return {ranks.begin(), ranks.end()};
}

struct BackendOptions final : c10d::Backend::Options {
  explicit BackendOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options(kBackendName, timeout), engine(engine_options()) {}

#if HORON_HAS_HOOKS
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<BackendOptions>(*this);
  }
#endif

  horon::Options engine;
  // Its ranks are not those of the default group: it was made of several worlds, or out of such
  // one.
  bool has_foreign_ranks = false;

 private:
  static horon::Options engine_options();
};

}  // namespace horon::torch_backend
