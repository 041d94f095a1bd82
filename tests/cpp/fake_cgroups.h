// A system that says something about cgroups.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "core/error.h"

namespace horon::testing {

// What /proc/self/cgroup has, and files below the mount.
class FakeCgroups {
 public:
  FakeCgroups(const std::string& membership, const std::map<std::string, std::string>& files)
      : folder_(std::filesystem::temp_directory_path() /
                concat("horon-test-cgroups-", ::getpid(), '-', ++made)) {
    std::filesystem::create_directories(folder_ / "mount");
    std::ofstream(folder_ / "membership") << membership;
    for (const auto& [name, content] : files) {
      const std::filesystem::path path = folder_ / "mount" / name;
      std::filesystem::create_directories(path.parent_path());
      std::ofstream(path) << content;
    }
  }
  ~FakeCgroups() { std::filesystem::remove_all(folder_); }
  FakeCgroups(const FakeCgroups&) = delete;
  FakeCgroups& operator=(const FakeCgroups&) = delete;

  std::string membership() const { return folder_ / "membership"; }
  std::string mount() const { return folder_ / "mount"; }

 private:
  static inline int made = 0;
  const std::filesystem::path folder_;
};

}  // namespace horon::testing
