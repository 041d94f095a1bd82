#include "shm/memory_limit.h"

#include <cstdint>
#include <fstream>
#include <vector>

#include "core/error.h"

namespace horon {
namespace {

// The number in a one-line file; nothing when it is missing or says "max".
std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) {
    return value;
  }
  return std::nullopt;
}

// Path of this process's cgroup (v2), "" when unknown.
std::string cgroup_path() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("0::", 0) == 0) {
      return "/sys/fs/cgroup" + line.substr(3);
    }
  }
  return "";
}

// Page cache counts as usage but is given back under pressure.
std::uint64_t reclaimable_bytes(const std::string& path) {
  std::ifstream file(path + "/memory.stat");
  std::string name;
  std::uint64_t value = 0;
  std::uint64_t total = 0;
  while (file >> name >> value) {
    if (name == "inactive_file" || name == "active_file") {
      total += value;
    }
  }
  return total;
}

// Nothing when the limit or the usage is not known.
std::optional<std::uint64_t> left_below_limit(const std::string& path, const char* limit_name,
                                              const char* usage_name) {
  const auto limit = read_number(path + limit_name);
  auto usage = read_number(path + usage_name);
  if (!limit || !usage) {
    return std::nullopt;
  }
  const std::uint64_t reclaimable = reclaimable_bytes(path);
  *usage -= *usage > reclaimable ? reclaimable : *usage;
  return *limit > *usage ? *limit - *usage : 0;
}

// A line of /proc/meminfo.
std::optional<std::uint64_t> memory_info_bytes(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  std::string word;
  while (file >> word) {
    if (word == name) {
      std::uint64_t kibibytes = 0;
      if (file >> kibibytes) {
        return kibibytes * 1024;
      }
    }
  }
  return std::nullopt;
}

std::optional<std::string> compare(std::size_t bytes, std::uint64_t free_bytes, const char* what) {
  if (bytes <= free_bytes) {
    return std::nullopt;
  }
  return concat(bytes, " bytes are needed and ", free_bytes, " are left of ", what, ".");
}

// Directories of this process's cgroup (v2) and of all above it.
std::vector<std::string> cgroup_levels() {
  std::vector<std::string> levels;
  for (std::string path = cgroup_path(); path.size() >= sizeof("/sys/fs/cgroup") - 1;
       path.resize(path.rfind('/'))) {
    levels.push_back(path);
  }
  return levels;
}

}  // namespace

std::optional<std::string> why_memory_is_short(std::size_t bytes) {
  // The limit of every level above counts, too.
  for (const std::string& path : cgroup_levels()) {
    if (const auto left = left_below_limit(path, "/memory.max", "/memory.current")) {
      if (auto refusal = compare(bytes, *left, "the cgroup's memory.max")) {
        return refusal;
      }
    }
  }
  if (const auto left = left_below_limit("/sys/fs/cgroup/memory", "/memory.limit_in_bytes",
                                         "/memory.usage_in_bytes")) {
    if (auto refusal = compare(bytes, *left, "the cgroup's memory limit")) {
      return refusal;
    }
  }
  if (const auto available = memory_info_bytes("MemAvailable:")) {
    return compare(bytes, *available, "the machine's available memory");
  }
  return std::nullopt;
}

std::optional<std::uint64_t> usable_memory_bytes() {
  auto usable = memory_info_bytes("MemTotal:");
  const auto limit_to = [&](const std::string& file) {
    const auto limit = read_number(file);
    if (limit && (!usable || *limit < *usable)) {
      usable = limit;
    }
  };
  for (const std::string& path : cgroup_levels()) {
    limit_to(path + "/memory.max");
  }
  limit_to("/sys/fs/cgroup/memory/memory.limit_in_bytes");
  return usable;
}

}  // namespace horon
