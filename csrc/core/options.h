// The settings of a group. Every rank of a group must use the same values; this is checked when the
// group is made.
#pragma once

#include <cstddef>
#include <string>

namespace horon {

struct Options {
  // Messages that publish at most this many bytes a rank travel in one step, with the header.
  // Default 8 KiB. Larger: fewer synchronisations for middling sizes, but each rank reads n times
  // as much. Environment: HORON_INLINE_BYTES.
  std::size_t inline_bytes = std::size_t{8} * 1024;

  // Each rank has two data buffers of this many bytes, and large messages pass through them piece
  // by piece. Default 512 KiB: both ranks' buffers stay in a 2 MiB share of the last-level cache.
  // Environment: HORON_BUFFER_BYTES.
  std::size_t buffer_bytes = std::size_t{512} * 1024;

  // Ring between each ordered pair of ranks, for point-to-point messages. Default 64 KiB. Pages are
  // taken from the system only when a pair talks. Environment: HORON_RING_BYTES.
  std::size_t ring_bytes = std::size_t{64} * 1024;

  // Point-to-point messages of at most this many bytes are sent without asking the receiver first.
  // Default 8 KiB. Environment: HORON_EAGER_BYTES.
  std::size_t eager_bytes = std::size_t{8} * 1024;

  // Ranks with different values count as different hosts, whatever the machine says. For tests, and
  // for containers that share a kernel but no memory. Environment: HORON_HOST_ID.
  std::string host_id;

  // Defaults, overridden by the environment. Throws UsageError for values that make no sense.
  static Options from_environment();

  // Throws UsageError for values that make no sense.
  void validate() const;

  // What ranks compare when a group is made; host_id is left out.
  std::string fingerprint() const;
};

}  // namespace horon
