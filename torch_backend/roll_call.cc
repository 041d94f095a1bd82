#include "roll_call.h"

#include <utility>

#include "errors.h"
#include "shm/rendezvous.h"
#include "store_adapter.h"

namespace horon::torch_backend {

std::int64_t call_roll(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, std::function<void()> look_around) {
  try {
    GroupIdentity identity{rank, size, {}};
    for (int peer = 0; peer < size; ++peer) {
      identity.global_ranks.push_back(peer);
    }
    StoreAdapter adapter(store, std::move(look_around));
    return horon::call_roll(adapter, identity, Options::from_environment(),
                            Deadline::after(timeout));
  } catch (...) {
    rethrow_translated();
  }
}

}  // namespace horon::torch_backend
