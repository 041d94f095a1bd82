// What CrossTransport needs from whatever carries bytes between hosts (Gloo, or a test's fake).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/wait_context.h"

namespace horon {

// All calls block, come in the same order on every rank, and throw Error when the network, a peer
// or the deadline fails them.
class ByteTransport {
 public:
  virtual ~ByteTransport() = default;

  // Every rank gives `bytes` and gets n times as many, in rank order.
  virtual void all_gather(const std::byte* send, std::byte* receive, std::size_t bytes,
                          const WaitContext& context) = 0;

  // Rank d gets send_bytes[d] of what lies at `send` (in rank order); receive_bytes[s] come from
  // rank s.
  virtual void all_to_all(const std::byte* send, const std::vector<std::uint64_t>& send_bytes,
                          std::byte* receive, const std::vector<std::uint64_t>& receive_bytes,
                          const WaitContext& context) = 0;

  // Makes running and later calls fail.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace horon
