#include "shm/memory_limit.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <vector>

#include "core/cgroup_line.h"
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

// A directory of a cgroup that may limit memory, and what its files are called there.
struct MemoryCgroup {
  std::string path;
  const char* limit;
  const char* usage;
  const char* description;

  std::optional<std::uint64_t> limit_bytes() const { return read_number(path + limit); }
};

MemoryCgroup version_1(const std::string& path) {
  return {path, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "the cgroup's memory limit"};
}

MemoryCgroup version_2(const std::string& path) {
  return {path, "/memory.max", "/memory.current", "the cgroup's memory.max"};
}

// The cgroup and all above it, whose limits count, too. In a container the mount may begin at the
// container's own cgroup, while the path is that of the host.
void add_levels(const std::string& mount, std::string path,
                MemoryCgroup (*cgroup_at)(const std::string&), std::vector<MemoryCgroup>* cgroups) {
  while (!path.empty()) {
    cgroups->push_back(cgroup_at(mount + path));
    path.resize(path.rfind('/'));  // the parent; "" above the root's children
  }
  cgroups->push_back(cgroup_at(mount));
}

// All that this process is in.
std::vector<MemoryCgroup> memory_cgroups(const CgroupFiles& files) {
  std::vector<MemoryCgroup> cgroups;
  std::ifstream file(files.membership);
  std::string line;
  std::string path_1;
  while (std::getline(file, line)) {  // "4:memory:/path", or version 2's "0::/path"
    const CgroupLine cgroup = parse_cgroup_line(line);
    if (cgroup.controllers.empty() && !cgroup.path.empty()) {
      add_levels(files.mount, cgroup.path, version_2, &cgroups);
    } else if (cgroup.has_controller("memory")) {
      path_1 = cgroup.path;
    }
  }
  // Also where the membership does not say: a container may hide it.
  add_levels(files.mount + "/memory", path_1, version_1, &cgroups);
  return cgroups;
}

// Page cache counts as usage but is given back under pressure. Version 1 counts the cgroups below
// in other lines of the file, which begin with "total_".
std::uint64_t reclaimable_bytes(const std::string& path) {
  std::ifstream file(path + "/memory.stat");
  std::string name;
  std::uint64_t value = 0;
  std::uint64_t own = 0;
  std::uint64_t with_those_below = 0;
  while (file >> name >> value) {
    if (name == "inactive_file" || name == "active_file") {
      own += value;
    } else if (name == "total_inactive_file" || name == "total_active_file") {
      with_those_below += value;
    }
  }
  return std::max(own, with_those_below);
}

// Nothing when the limit or the usage is not known.
std::optional<std::uint64_t> left_below_limit(const MemoryCgroup& cgroup) {
  const auto limit = cgroup.limit_bytes();
  auto usage = read_number(cgroup.path + cgroup.usage);
  if (!limit || !usage) {
    return std::nullopt;
  }
  const std::uint64_t reclaimable = reclaimable_bytes(cgroup.path);
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

}  // namespace

std::optional<std::string> why_memory_is_short(std::size_t bytes, const CgroupFiles& files) {
  for (const MemoryCgroup& cgroup : memory_cgroups(files)) {
    if (const auto left = left_below_limit(cgroup)) {
      if (auto refusal = compare(bytes, *left, cgroup.description)) {
        return refusal;
      }
    }
  }
  if (const auto available = memory_info_bytes("MemAvailable:")) {
    return compare(bytes, *available, "the machine's available memory");
  }
  return std::nullopt;
}

std::optional<std::uint64_t> usable_memory_bytes(const CgroupFiles& files) {
  auto usable = memory_info_bytes("MemTotal:");
  for (const MemoryCgroup& cgroup : memory_cgroups(files)) {
    const auto limit = cgroup.limit_bytes();
    if (limit && (!usable || *limit < *usable)) {
      usable = limit;
    }
  }
  return usable;
}

}  // namespace horon
