// What precedes each part of a point-to-point message, in a ring of shared memory and on a
// connection between hosts.
#pragma once

#include <cstdint>
#include <type_traits>

namespace horon {

enum class FrameType : std::uint32_t {
  kEager,          // a whole message
  kRequestToSend,  // a message that wants to be asked for
  kClearToSend,    // receiver to sender: go on with message `id`
  kData,           // a part of message `id`
  kAcknowledge,    // receiver to sender: eager message `id` found its receive
  kRefuse,         // receiver to sender: message `id` met a receive of `message_bytes` bytes
  // Between hosts, where no memory tells:
  kGoodbye,  // the sender takes no further step
  kEnd,      // the group has ended; the payload says why
};

struct Frame {
  FrameType type = FrameType::kEager;
  std::int32_t tag = 0;
  std::uint64_t id = 0;  // unique per sender
  std::uint64_t message_bytes = 0;
  std::uint64_t payload_bytes = 0;  // that follow
};
static_assert(std::is_trivially_copyable_v<Frame>);

}  // namespace horon
