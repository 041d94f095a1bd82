// Which CPUs processes may use, and how many they can keep busy together.
#pragma once

#include <string>
#include <vector>

namespace horon {

struct CpuBudget {
  std::vector<int> cpus;  // that this process may run on
  double quota = 0;       // CPUs' worth of time that its cgroup may use; 0: no limit

  // "0,1,5;1.5".
  std::string encode() const;
  // Throws Error for anything else.
  static CpuBudget decode(const std::string& text);
};

// Where the calling thread may run; everything the machine has, where the system does not say.
std::vector<int> allowed_cpus();

// This process's; everything the machine has, where the system does not say.
CpuBudget own_cpu_budget();

// The tightest limit of a process's cgroups, of version 1 or 2, in CPUs; 0: none. `membership` is
// its /proc/PID/cgroup, `mount` where cgroups are mounted.
double cgroup_quota(const std::string& membership, const std::string& mount);

// Pure. How many CPUs processes with these budgets can use at once. Quotas count as one and the
// same, as they are for the processes of one container.
double common_cpus(const std::vector<CpuBudget>& budgets);

}  // namespace horon
