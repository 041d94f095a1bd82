// What CrossTransport needs from whatever carries bytes between hosts (connections of our own,
// Gloo, or a test's fake).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/request.h"
#include "core/wait_context.h"

namespace horon {

// By rank.
using SentSpans = std::vector<ConstSpan>;
using ReceivedSpans = std::vector<Span>;

// All calls block, come in the same order on every rank, and throw Error when the network, a peer
// or the deadline fails them. No memory of a call is touched after it.
class ByteTransport {
 public:
  virtual ~ByteTransport() = default;

  // Rank d gets send[d], and what rank s sends here comes to receive[s], which is as long. A rank's
  // own entries are not looked at. What is received does not overlap what is sent.
  virtual void exchange(const SentSpans& send, const ReceivedSpans& receive,
                        const WaitContext& context) = 0;

  // Every rank gives `bytes` and gets n times as many, in rank order.
  virtual void all_gather(const std::byte* send, std::byte* receive, std::size_t bytes,
                          const WaitContext& context) = 0;

  // Makes running and later calls fail.
  virtual void abort(const std::string& reason) = 0;

  // No call follows: others who call need not wait for this rank.
  virtual void depart() {}
};

}  // namespace horon
