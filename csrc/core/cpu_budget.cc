#include "core/cpu_budget.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "core/error.h"

namespace horon {
namespace {

// The tightest "quota period" of a cgroup (v2) and those above it, in CPUs; 0: none.
double cgroup_quota() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  std::string path;
  while (std::getline(file, line)) {
    if (line.rfind("0::", 0) == 0) {
      path = line.substr(3);
    }
  }
  double tightest = 0;
  while (!path.empty()) {
    std::ifstream limits("/sys/fs/cgroup" + path + "/cpu.max");
    double quota = 0;
    double period = 0;
    if (limits >> quota >> period && period > 0) {  // the word "max" is no number
      const double cpus = quota / period;
      tightest = tightest == 0 ? cpus : std::min(tightest, cpus);
    }
    path.resize(path.rfind('/'));  // the parent; "" above the root's children
  }
  return tightest;
}

}  // namespace

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

CpuBudget own_cpu_budget() {
  CpuBudget budget;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &allowed)) {
        budget.cpus.push_back(cpu);
      }
    }
  }
  if (budget.cpus.empty()) {  // more CPUs than the set can hold
    for (unsigned cpu = 0; cpu < std::max(1U, std::thread::hardware_concurrency()); ++cpu) {
      budget.cpus.push_back(static_cast<int>(cpu));
    }
  }
  budget.quota = cgroup_quota();
  return budget;
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
