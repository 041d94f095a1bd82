#include "nccl/unique_id_exchange.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/rank_list.h"

namespace horon {
namespace {

// The first byte of what rank 0 stores says what follows.
constexpr char kHasId = 'i';
constexpr char kHasError = 'e';

std::string make_record(NcclApi& api, NcclUniqueId* id) {
  const NcclResult result = api.get_unique_id(id);
  if (result == NcclResult::kSuccess) {
    return kHasId + std::string(id->bytes.begin(), id->bytes.end());
  }
  return kHasError + concat("ncclGetUniqueId failed on rank 0: ", api.error_text(result), " (",
                            static_cast<int>(result), "); NCCL says: ", api.last_error(nullptr),
                            ". Run with NCCL_DEBUG=WARN for more.");
}

NcclUniqueId id_of(const std::string& record, const std::string& name, const std::string& key) {
  if (!record.empty() && record[0] == kHasError) {
    throw GroupError(concat("communicator '", name, "': ", record.substr(1)));
  }
  NcclUniqueId id;
  HORON_CHECK(record.size() == id.bytes.size() + 1 && record[0] == kHasId, "communicator '", name,
              "': the store's key ", key, " holds ", record.size(), " bytes, expected ",
              id.bytes.size() + 1, ". Does something else use this key?");
  std::copy(record.begin() + 1, record.end(), id.bytes.begin());
  return id;
}

std::string arrival_key(const std::string& prefix, int rank) {
  return concat(prefix, "/arrived/", rank);
}

// The ranks that have not come by the deadline.
std::vector<int> await_arrivals(Store& store, int n_ranks, const std::string& prefix,
                                const Deadline& deadline) {
  std::vector<int> missing;
  for (int peer = 1; peer < n_ranks; ++peer) {
    try {
      (void)store.get(arrival_key(prefix, peer), deadline);
    } catch (const TimeoutError&) {
      missing.push_back(peer);
    }
  }
  return missing;
}

}  // namespace

NcclUniqueId exchange_unique_id(Store& store, NcclApi& api, int rank, int n_ranks,
                                const std::string& name, const Deadline& deadline) {
  const std::string counters = concat("horon/nccl/", name, '/');
  const std::int64_t generation = store.add(concat(counters, "generation/", rank), 1);
  const std::string prefix = concat(counters, generation);
  const std::string key = concat(prefix, "/unique_id");
  if (rank != 0) {
    store.set(arrival_key(prefix, rank), "1");
    return id_of(store.get(key, deadline), name, key);
  }
  std::vector<int> missing;
  try {
    missing = await_arrivals(store, n_ranks, prefix, deadline);
  } catch (const GroupError& error) {
    store.set(key, kHasError + std::string(error.what()));
    throw;
  }
  if (!missing.empty()) {
    const std::string what =
        concat("communicator '", name, "' of ", n_ranks, " ranks: ", name_ranks(missing),
               " did not come within ", deadline.timeout().count(), " ms.");
    store.set(key, kHasError + what);
    throw TimeoutError(what);
  }
  NcclUniqueId id;
  const std::string record = make_record(api, &id);
  store.set(key, record);
  return id_of(record, name, key);
}

}  // namespace horon
