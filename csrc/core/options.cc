#include "core/options.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "core/error.h"

namespace horon {
namespace {

// False when the variable is not set.
bool read_number(const char* variable, const char* what, std::size_t* value) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') {
    return false;
  }
  const char* end = text + std::strlen(text);
  std::size_t parsed = 0;
  const auto [rest, error] = std::from_chars(text, end, parsed);
  if (error != std::errc() || rest != end) {
    throw UsageError(concat(variable, ": expected a number of ", what, ", got '", text, "'."));
  }
  *value = parsed;
  return true;
}

bool read_bytes(const char* variable, std::size_t* value) {
  return read_number(variable, "bytes", value);
}

bool read_switch(const char* variable, bool otherwise) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') {
    return otherwise;
  }
  const std::string_view value = text;
  if (value != "on" && value != "off") {
    throw UsageError(concat(variable, ": expected on or off, got '", value, "'."));
  }
  return value == "on";
}

void check_range(const char* what, std::size_t value, std::size_t low, std::size_t high) {
  if (value < low || value > high || value % 64 != 0) {
    throw UsageError(concat("option ", what, ": expected a multiple of 64 between ", low, " and ",
                            high, " bytes, got ", value, "."));
  }
}

// So that an eager message fits into a ring beside others.
std::size_t most_eager_bytes(std::size_t ring_bytes) {
  return (ring_bytes != 0 ? ring_bytes : kLeastAutomaticRingBytes) / 4;
}

}  // namespace

std::size_t automatic_ring_bytes(int n_ranks) {
  constexpr std::size_t kMostBytes = std::size_t{2} << 20;
  constexpr std::size_t kMostTogether = std::size_t{8} << 20;
  const auto n = static_cast<std::size_t>(n_ranks);
  const std::size_t share = kMostTogether / std::max<std::size_t>(n * (n - 1), 1);
  return std::clamp(share / kLeastAutomaticRingBytes * kLeastAutomaticRingBytes,
                    kLeastAutomaticRingBytes, kMostBytes);
}

Options Options::from_environment() {
  Options options;
  read_bytes("HORON_INLINE_BYTES", &options.inline_bytes);
  read_bytes("HORON_DEPOSIT_BYTES", &options.deposit_bytes);
  read_bytes("HORON_BUFFER_BYTES", &options.buffer_bytes);
  read_bytes("HORON_RING_BYTES", &options.ring_bytes);
  read_bytes("HORON_EAGER_BYTES", &options.eager_bytes);
  read_bytes("HORON_CUDA_BATCH_BYTES", &options.cuda_batch_bytes);
  if (const char* claiming = std::getenv("HORON_CLAIMING"); claiming != nullptr && *claiming) {
    options.claiming = claiming;
  }
  options.sparse = read_switch("HORON_SPARSE", options.sparse);
  options.hierarchical = read_switch("HORON_HIERARCHICAL", options.hierarchical);
  if (const char* carrier = std::getenv("HORON_CARRIER"); carrier != nullptr && *carrier) {
    options.carrier = carrier;
  }
  if (const char* host = std::getenv("HORON_HOST_ID")) {
    options.host_id = host;
  }
  options.validate();
  return options;
}

std::optional<std::size_t> arena_bytes_from_environment() {
  std::size_t bytes = 0;
  if (!read_bytes("HORON_ARENA_BYTES", &bytes)) {
    return std::nullopt;
  }
  constexpr std::size_t kMaxBytes = std::size_t{1} << 46;  // half of the address space
  if (bytes > kMaxBytes) {
    throw UsageError(
        concat("HORON_ARENA_BYTES: expected at most ", kMaxBytes, ", got ", bytes, "."));
  }
  return bytes;
}

bool may_move_threads_from_environment() { return read_switch("HORON_MOVE_THREADS", true); }

bool watch_from_environment() { return read_switch("HORON_WATCH", true); }

std::string network_interfaces_from_environment() {
  for (const char* variable : {"HORON_IFACE", "HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME"}) {
    if (const char* text = std::getenv(variable); text != nullptr && *text != '\0') {
      return text;
    }
  }
  return "";
}

std::chrono::microseconds linger_time_from_environment() {
  constexpr const char* kVariable = "HORON_LINGER_US";
  constexpr std::size_t kMost = 50'000;  // then everybody looks around, for death and Ctrl-C
  std::size_t time = 10'000;
  if (read_number(kVariable, "microseconds", &time) && time > kMost) {
    throw UsageError(
        concat(kVariable, ": expected at most ", kMost, " microseconds, got ", time, "."));
  }
  return std::chrono::microseconds(time);
}

bool gradients_in_place_from_environment() { return read_switch("HORON_GRADIENTS_IN_PLACE", true); }

bool reduce_while_made_from_environment() { return read_switch("HORON_REDUCE_WHILE_MADE", true); }

void Options::validate() const {
  if (claiming != "auto" && claiming != "on" && claiming != "off") {
    throw UsageError(concat("option claiming: expected auto, on or off, got '", claiming, "'."));
  }
  if (carrier != "tcp" && carrier != "gloo") {
    throw UsageError(concat("option carrier: expected tcp or gloo, got '", carrier, "'."));
  }
  constexpr std::size_t kMaxBytes = std::size_t{1} << 30;
  check_range("inline_bytes", inline_bytes, 0, kMaxBytes);
  check_range("deposit_bytes", deposit_bytes, 4096, kMaxBytes);
  check_range("buffer_bytes", buffer_bytes, 4096, kMaxBytes);
  if (ring_bytes != 0) {
    check_range("ring_bytes", ring_bytes, 4096, kMaxBytes);
  }
  if (eager_bytes != kDefaultEagerBytes) {
    check_range("eager_bytes", eager_bytes, 0, most_eager_bytes(ring_bytes));
  }
  check_range("cuda_batch_bytes", cuda_batch_bytes, 0, kMaxBytes);
}

std::size_t Options::fitting_eager_bytes() const {
  return std::min(eager_bytes, most_eager_bytes(ring_bytes));
}

std::string Options::fingerprint() const {
  return concat("inline=", inline_bytes, " deposit=", deposit_bytes, " buffer=", buffer_bytes,
                " claiming=", claiming, " ring=", ring_bytes, " eager=", eager_bytes,
                " cuda_batch=", cuda_batch_bytes, " sparse=", sparse ? "on" : "off",
                " hierarchical=", hierarchical ? "on" : "off", " carrier=", carrier);
}

}  // namespace horon
