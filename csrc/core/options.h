// The settings of a group. Every rank of a group must use the same values; this is checked when the
// group is made.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

namespace horon {

// What a ring for point-to-point messages has where nobody has chosen: 2 MiB with two ranks, as a
// data ring has and for the same reason (Note [Data rings]); all of a group together at most 8 MiB,
// but each at least kLeastAutomaticRingBytes. Where memory has to come from /dev/shm, all of it is
// taken at once, and what horon.torch needs for 8 ranks fits into a container's 64 MiB.
inline constexpr std::size_t kLeastAutomaticRingBytes = std::size_t{64} * 1024;
std::size_t automatic_ring_bytes(int n_ranks);

struct Options {
  // Messages that publish at most this many bytes a rank travel in one step, with the header.
  // Default 8 KiB. Larger: fewer synchronisations for middling sizes, but each rank reads n times
  // as much. Environment: HORON_INLINE_BYTES.
  std::size_t inline_bytes = std::size_t{8} * 1024;

  // Each rank has a ring of this many bytes for what it brings to operations that others have not
  // finished: the headers, and messages of at most inline_bytes. Default 256 KiB: some 60
  // asynchronous operations of 4 KiB are under way before a caller has to finish the first ones
  // (at least four of the largest fit, whatever is asked). Environment: HORON_DEPOSIT_BYTES.
  std::size_t deposit_bytes = std::size_t{256} * 1024;

  // Each rank has a ring of this many bytes that large messages pass through, in pieces of at most
  // a quarter of it and 512 KiB. Default 2 MiB: more than a core's private cache, less than the
  // shared one; see Note [Data rings]. Environment: HORON_BUFFER_BYTES.
  std::size_t buffer_bytes = std::size_t{2} * 1024 * 1024;

  // Ring between each ordered pair of ranks, for point-to-point messages. Default 0: by the number
  // of ranks, see automatic_ring_bytes(). Pages are taken from the system only when a pair talks.
  // Environment: HORON_RING_BYTES.
  std::size_t ring_bytes = 0;

  // Point-to-point messages of at most this many bytes are sent without asking the receiver first.
  // Default 16 KiB, which counts as a quarter of a ring that is smaller than four times so much.
  // Environment: HORON_EAGER_BYTES.
  static constexpr std::size_t kDefaultEagerBytes = std::size_t{16} * 1024;
  std::size_t eager_bytes = kDefaultEagerBytes;

  // Whether ranks that are awake do the work of those that are not: "auto" (when there are more
  // ranks than cores), "on" or "off". Default auto. Environment: HORON_CLAIMING.
  std::string claiming = "auto";

  // Separate all-reduces of CUDA tensors of at most this many bytes travel together: what is called
  // close in time becomes one call of NCCL, which all ranks agree on. Default 0: each goes by
  // itself, at once. A call that is waited for then blocks the host until all ranks have made it.
  // Environment: HORON_CUDA_BATCH_BYTES.
  std::size_t cuda_batch_bytes = 0;

  // Whether all_reduce takes sparse COO tensors on the CPU, as DDP has them for embeddings with
  // sparse gradients. Default off: who passes a sparse tensor by mistake gets an error at once.
  // Environment: HORON_SPARSE (on or off).
  bool sparse = false;

  // Where ranks of a group are on several hosts: whether those of one host share memory, and only
  // what the other hosts must have goes over the network. Default on. Environment:
  // HORON_HIERARCHICAL (on or off).
  bool hierarchical = true;

  // What carries bytes between hosts: "tcp", horon's own connections (Gloo where these can not be
  // made), or "gloo". Default tcp. Environment: HORON_CARRIER.
  std::string carrier = "tcp";

  // Ranks with different values count as different hosts, whatever the machine says. For tests, and
  // for containers that share a kernel but no memory. Environment: HORON_HOST_ID.
  std::string host_id;

  // Defaults, overridden by the environment. Throws UsageError for values that make no sense.
  static Options from_environment();

  // Throws UsageError for values that make no sense.
  void validate() const;

  // eager_bytes, or less by default where the rings are small.
  std::size_t fitting_eager_bytes() const;

  // What ranks compare when a group is made; host_id is left out.
  std::string fingerprint() const;
};

// HORON_ARENA_BYTES: how much memory tensors of this process may take in its arena; 0 turns the
// arena off. A setting of the process, not of a group. Nothing when it is not set.
std::optional<std::size_t> arena_bytes_from_environment();

// HORON_MOVE_THREADS: whether ranks that share a core may move to an emptier one (on, the default,
// or off). A setting of the process. Throws UsageError for other values.
bool may_move_threads_from_environment();

// HORON_WATCH: whether other processes may ask this one where it is (on, the default, or off). A
// setting of the process. Throws UsageError for other values.
bool watch_from_environment();

// HORON_IFACE, or else HOROVOD_GLOO_IFACE or GLOO_SOCKET_IFNAME: the network interfaces
// ("eth0,eth1") by which other hosts reach this one. Empty: all.
std::string network_interfaces_from_environment();

// HORON_LINGER_US: how many microseconds a call that waits keeps its core before it sleeps, where
// every rank has one. Default 10,000. A setting of the process. Throws UsageError for values that
// make no sense.
std::chrono::microseconds linger_time_from_environment();

// HORON_GRADIENTS_IN_PLACE: whether the backward pass makes small gradients right in
// DistributedOptimizer's buckets (on, the default), or they are copied there (off). A setting of
// the process. Throws UsageError for other values.
bool gradients_in_place_from_environment();

// HORON_REDUCE_WHILE_MADE: see Note [Made in parts] in named/part_maker.h. Throws as above.
bool reduce_while_made_from_environment();

}  // namespace horon
