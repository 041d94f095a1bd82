#include "shm/memory_limit.h"

#include <map>
#include <optional>
#include <string>

#include "catch.h"
#include "core/error.h"
#include "fake_cgroups.h"
#include "rank_threads.h"
#include "shm/mapping.h"

using namespace horon;
using namespace horon::testing;

namespace {

constexpr std::size_t kAbsurd = std::size_t{1} << 60;

// What we make of what a system says about cgroups.
class MemoryOf {
 public:
  MemoryOf(const std::string& membership, const std::map<std::string, std::string>& files)
      : cgroups_(membership, files) {}

  bool has(std::size_t bytes) const { return !why_memory_is_short(bytes, files()).has_value(); }
  // How many bytes it has for us.
  bool has_just(std::size_t bytes) const { return has(bytes) && !has(bytes + 1); }
  std::optional<std::uint64_t> usable() const { return usable_memory_bytes(files()); }

 private:
  CgroupFiles files() const { return {cgroups_.membership(), cgroups_.mount()}; }

  const FakeCgroups cgroups_;
};

}  // namespace

TEST_CASE("a little memory is always there") {
  REQUIRE_FALSE(why_memory_is_short(0).has_value());
  REQUIRE_FALSE(why_memory_is_short(4096).has_value());
}

TEST_CASE("an exbibyte is refused with what is needed and what is left") {
  const auto reason = why_memory_is_short(kAbsurd);
  REQUIRE(reason.has_value());
  INFO(*reason);
  REQUIRE(contains(*reason, std::to_string(kAbsurd)));
  REQUIRE(contains(*reason, "are left of"));
}

TEST_CASE("a shared file that does not fit is an error, not a signal") {
  const std::exception_ptr error = error_of([] { create_shared_file(kAbsurd, kAbsurd); });
  REQUIRE(threw<Error>(error));
  REQUIRE(contains(text_of(error), "shared memory for a group"));
  REQUIRE(contains(text_of(error), "HORON_BUFFER_BYTES"));
}

TEST_CASE("memory limits of cgroups, version 2") {
  CHECK(MemoryOf("0::/\n", {{"memory.max", "max\n"}, {"memory.current", "5\n"}}).has(1 << 20));
  const MemoryOf nested("0::/a/b\n", {{"a/b/memory.max", "max\n"},
                                      {"a/b/memory.current", "1000\n"},
                                      {"a/memory.max", "9000\n"},
                                      {"a/memory.current", "2000\n"}});
  CHECK(nested.has_just(7000));
  CHECK(nested.usable() == 9000);
  // The path of the host, in a container; what is cached can be had.
  const MemoryOf container("0::/docker/c0ffee\n",
                           {{"memory.max", "9000\n"},
                            {"memory.current", "2000\n"},
                            {"memory.stat", "anon 1500\ninactive_file 300\nactive_file 200\n"}});
  CHECK(container.has_just(7500));
}

TEST_CASE("memory limits of cgroups, version 1, also below the root of the hierarchy") {
  const std::string membership = "9:name=systemd:/\n4:cpuset,memory:/slurm/job_7\n3:cpu:/x\n0::/\n";
  CHECK(MemoryOf(membership, {}).has(1 << 20));
  const MemoryOf job(membership, {{"memory/memory.limit_in_bytes", "9223372036854771712\n"},
                                  {"memory/memory.usage_in_bytes", "50000\n"},
                                  {"memory/slurm/job_7/memory.limit_in_bytes", "9000\n"},
                                  {"memory/slurm/job_7/memory.usage_in_bytes", "2000\n"}});
  CHECK(job.has_just(7000));
  CHECK(job.usable() == 9000);
  // A container shows its own cgroup as the root.
  const MemoryOf container("4:memory:/docker/c0ffee\n",
                           {{"memory/memory.limit_in_bytes", "9000\n"},
                            {"memory/memory.usage_in_bytes", "2000\n"},
                            {"memory/memory.stat",
                             "inactive_file 0\nactive_file 1\ntotal_inactive_file 400\n"
                             "total_active_file 100\n"}});
  CHECK(container.has_just(7500));
}
