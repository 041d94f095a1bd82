#include "settings.h"

#include <cstdlib>
#include <random>
#include <sstream>
#include <string>

namespace horon::simulator {
namespace {

std::uint64_t number(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::strtoull(text, nullptr, 10);
}

std::vector<int> visible_devices() {
  const int count = static_cast<int>(number("HORON_SIMULATOR_DEVICES", 1));
  std::vector<int> visible;
  const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES");
  if (chosen == nullptr) {
    for (int device = 0; device < count; ++device) {
      visible.push_back(device);
    }
    return visible;
  }
  // As CUDA does: what comes after the first entry that names no device is hidden.
  std::istringstream entries(chosen);
  for (int device; entries >> device && device >= 0 && device < count; entries.ignore(1)) {
    visible.push_back(device);
  }
  return visible;
}

Settings read_environment() {
  return {
      .visible_devices = visible_devices(),
      .memory_bytes = number("HORON_SIMULATOR_MEMORY_MB", 8192) << 20,
      .max_delay_us = number("HORON_SIMULATOR_DELAY_US", 0),
      .seed = number("HORON_SIMULATOR_SEED", std::random_device{}()),
      .ignores_kernels = number("HORON_SIMULATOR_IGNORE_KERNELS", 0) != 0,
      .reports_remote_errors = number("HORON_SIMULATOR_REMOTE_ERROR", 0) != 0,
  };
}

}  // namespace

const Settings& settings() {
  static const Settings* const read = new Settings(read_environment());
  return *read;
}

}  // namespace horon::simulator
