#include "nccl/unique_id_exchange.h"

#include <algorithm>

#include "core/error.h"

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

}  // namespace

NcclUniqueId exchange_unique_id(Store& store, NcclApi& api, int rank, const std::string& name,
                                const Deadline& deadline) {
  const std::string prefix = concat("horon/nccl/", name, '/');
  const std::int64_t generation = store.add(concat(prefix, "generation/", rank), 1);
  const std::string key = concat(prefix, generation, "/unique_id");
  NcclUniqueId id;
  std::string record;
  if (rank == 0) {
    record = make_record(api, &id);
    store.set(key, record);
  } else {
    record = store.get(key, deadline);
  }
  if (!record.empty() && record[0] == kHasError) {
    throw GroupError(concat("communicator '", name, "': ", record.substr(1)));
  }
  HORON_CHECK(record.size() == id.bytes.size() + 1 && record[0] == kHasId, "communicator '", name,
              "': the store's key ", key, " holds ", record.size(), " bytes, expected ",
              id.bytes.size() + 1, ". Does something else use this key?");
  std::copy(record.begin() + 1, record.end(), id.bytes.begin());
  return id;
}

}  // namespace horon
