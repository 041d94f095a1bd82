// A process group that Python made (Gloo) as a carrier of bytes between hosts.
#pragma once

#include <functional>

#include "compat.h"
#include "core/scratch.h"
#include "cross/byte_transport.h"

namespace horon::torch_backend {

// Calls the old names of c10d's methods: the new ones forward to them, and their guard against
// endless recursion is per thread, not per object.
class GlooAdapter final : public ByteTransport {
 public:
  explicit GlooAdapter(c10::intrusive_ptr<c10d::Backend> gloo) : gloo_(std::move(gloo)) {}

  void all_gather(const std::byte* send, std::byte* receive, std::size_t bytes,
                  const WaitContext& context) override;
  void exchange(const SentSpans& send, const ReceivedSpans& receive,
                const WaitContext& context) override;
  void abort(const std::string& reason) override;

  // For point-to-point messages, which Gloo matches itself.
  c10d::Backend& gloo() { return *gloo_; }

 private:
  Scratch sent_;  // one after another, as Gloo takes them
  Scratch received_;
  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace horon::torch_backend
