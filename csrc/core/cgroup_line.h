// A line of /proc/<pid>/cgroup: in which cgroup of one hierarchy a process is.
#pragma once

#include <string>

namespace horon {

// Plain data. A line that can not be read has no path.
struct CgroupLine {
  std::string controllers;  // with commas; empty: version 2's only hierarchy
  std::string path;         // begins with a slash, and is as the process's namespace shows it

  bool has_controller(const std::string& name) const {
    return (',' + controllers + ',').find(',' + name + ',') != std::string::npos;
  }
};

// "4:cpu,cpuacct:/path", or "0::/path" of version 2.
inline CgroupLine parse_cgroup_line(const std::string& line) {
  const std::size_t first = line.find(':');
  const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
  if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) {
    return {};
  }
  return {line.substr(first + 1, second - first - 1), line.substr(second + 1)};
}

}  // namespace horon
