// What ranks tell the coordinator, and what it tells them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "named/named_request.h"

namespace horon {

// Small numbers for requests that come again and again; see SignatureCache.
using RequestId = std::uint32_t;
inline constexpr RequestId kNoId = ~RequestId{0};

// What a join goes by.
inline constexpr const char* kJoinName = "horon.join";

// Rank to coordinator.
struct Announcement {
  // The values travel: append only.
  enum class Type : std::uint8_t {
    kRequest,  // `request`
    kKnown,    // the request with number `id`
    kJoin,
    kGoodbye,  // this rank announces nothing more
  };
  Type type = Type::kRequest;
  RequestId id = kNoId;
  RequestPtr request;
};

// Coordinator to ranks. The decisions form one order over all process sets; a rank gets those of
// the sets that it is in.
struct Decision {
  // The values travel: append only.
  enum class Type : std::uint8_t {
    kRun,         // `request`; from now on also known as `id` if there is one
    kRunKnown,    // the request with number `id`
    kFail,        // the operation `name` of `process_set`, for the reason `text`
    kJoined,      // every rank has joined; `value` was the last
    kSetAdded,    // the agreed request `request` made process set number `value`
    kSetRemoved,  // the agreed request `request` removed process set number `value`
    kGoodbye,     // nothing more will come to this rank
  };
  Type type = Type::kRun;
  bool is_usage_error = false;  // kFail: the caller's fault, not a disagreement
  std::int32_t process_set = 0;
  std::int32_t value = 0;
  RequestId id = kNoId;
  RequestPtr request;  // here on the coordinator also with kRunKnown
  std::string name;
  std::string text;
  // Who gets it, if not all ranks of the process set. Does not travel.
  std::vector<int> only_ranks;
};

}  // namespace horon
