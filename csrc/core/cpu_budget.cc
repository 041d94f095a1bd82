#include "core/cpu_budget.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "core/cgroup_line.h"
#include "core/error.h"

namespace horon {
namespace {

// CPUs' worth of time; 0: no limit. Of a directory of cgroups v2, and of version 1's controller.
double quota_v2(const std::string& directory) {
  std::ifstream limits(directory + "/cpu.max");
  double quota = 0;
  double period = 0;
  limits >> quota >> period;  // the word "max" is no number
  return limits && period > 0 ? quota / period : 0;
}

double quota_v1(const std::string& directory) {
  double quota = 0;
  double period = 0;
  std::ifstream(directory + "/cpu.cfs_quota_us") >> quota;  // -1: none
  std::ifstream(directory + "/cpu.cfs_period_us") >> period;
  return quota > 0 && period > 0 ? quota / period : 0;
}

double tightest(double one, double other) {
  return one == 0 || other == 0 ? std::max(one, other) : std::min(one, other);
}

// Of a cgroup and all above it. In a container the mount may begin at the container's own cgroup,
// while the path is that of the host.
double tightest_quota(const std::string& mount, std::string path,
                      double (*quota_of)(const std::string&)) {
  double found = quota_of(mount);
  while (!path.empty()) {
    found = tightest(found, quota_of(mount + path));
    path.resize(path.rfind('/'));  // the parent; "" above the root's children
  }
  return found;
}

}  // namespace

double cgroup_quota(const std::string& membership, const std::string& mount) {
  std::ifstream file(membership);
  std::string line;
  double found = 0;
  while (std::getline(file, line)) {
    const CgroupLine cgroup = parse_cgroup_line(line);
    if (cgroup.path.empty()) {
      continue;
    }
    if (cgroup.controllers.empty()) {
      found = tightest(found, tightest_quota(mount, cgroup.path, quota_v2));
    } else if (cgroup.has_controller("cpu")) {
      found = tightest(found, tightest_quota(mount + "/cpu", cgroup.path, quota_v1));
    }
  }
  return found;
}

std::string CpuBudget::encode() const {
  std::ostringstream out;
  for (std::size_t i = 0; i < cpus.size(); ++i) {
    out << (i > 0 ? "," : "") << cpus[i];
  }
  out << ';' << quota;
  return out.str();
}

CpuBudget CpuBudget::decode(const std::string& text) {
  CpuBudget budget;
  const char* at = text.data();
  const char* const end = at + text.size();
  // Reads a number and, unless it is the last one, moves past the character behind it.
  const auto read = [&](auto& number) {
    const auto [rest, error] = std::from_chars(at, end, number);
    HORON_CHECK(error == std::errc() && number >= 0, "a CPU budget is damaged: '", text, "'");
    at = rest;
    return at != end ? *at++ : '\0';
  };
  char separator = ',';
  while (separator == ',') {
    separator = read(budget.cpus.emplace_back());
  }
  const bool has_quota = separator == ';';
  HORON_CHECK(has_quota && read(budget.quota) == '\0', "a CPU budget is damaged: '", text, "'");
  return budget;
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &allowed)) {
        cpus.push_back(cpu);
      }
    }
  }
  if (cpus.empty()) {  // more CPUs than the set can hold
    for (unsigned cpu = 0; cpu < std::max(1U, std::thread::hardware_concurrency()); ++cpu) {
      cpus.push_back(static_cast<int>(cpu));
    }
  }
  return cpus;
}

CpuBudget own_cpu_budget() {
  return {allowed_cpus(), cgroup_quota("/proc/self/cgroup", "/sys/fs/cgroup")};
}

double common_cpus(const std::vector<CpuBudget>& budgets) {
  std::set<int> cpus;
  double quota = 0;
  for (const CpuBudget& budget : budgets) {
    cpus.insert(budget.cpus.begin(), budget.cpus.end());
    if (budget.quota > 0) {
      quota = quota == 0 ? budget.quota : std::min(quota, budget.quota);
    }
  }
  const auto count = static_cast<double>(cpus.size());
  return quota > 0 ? std::min(quota, count) : count;
}

}  // namespace horon
