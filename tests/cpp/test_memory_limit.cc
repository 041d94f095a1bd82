#include "shm/memory_limit.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "catch.h"
#include "core/error.h"
#include "rank_threads.h"
#include "shm/mapping.h"

using namespace horon;
using namespace horon::testing;

namespace {

constexpr std::size_t kAbsurd = std::size_t{1} << 60;

// A system that says that about cgroups: what /proc/self/cgroup has, and files below the mount.
class FakeCgroups {
 public:
  FakeCgroups(const std::string& membership, const std::map<std::string, std::string>& files)
      : folder_(std::filesystem::temp_directory_path() /
                concat("horon-test-memory-cgroups-", ::getpid(), '-', ++made)) {
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

  bool has(std::size_t bytes) const { return !why_memory_is_short(bytes, files()).has_value(); }
  // How many bytes it has for us, as far as these cgroups say.
  bool has_just(std::size_t bytes) const { return has(bytes) && !has(bytes + 1); }
  std::optional<std::uint64_t> usable() const { return usable_memory_bytes(files()); }

 private:
  CgroupFiles files() const { return {folder_ / "membership", folder_ / "mount"}; }

  static inline int made = 0;
  const std::filesystem::path folder_;
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
  CHECK(FakeCgroups("0::/\n", {{"memory.max", "max\n"}, {"memory.current", "5\n"}}).has(1 << 20));
  const FakeCgroups nested("0::/a/b\n", {{"a/b/memory.max", "max\n"},
                                         {"a/b/memory.current", "1000\n"},
                                         {"a/memory.max", "9000\n"},
                                         {"a/memory.current", "2000\n"}});
  CHECK(nested.has_just(7000));
  CHECK(nested.usable() == 9000);
  // The path of the host, in a container; what is cached can be had.
  const FakeCgroups container("0::/docker/c0ffee\n",
                              {{"memory.max", "9000\n"},
                               {"memory.current", "2000\n"},
                               {"memory.stat", "anon 1500\ninactive_file 300\nactive_file 200\n"}});
  CHECK(container.has_just(7500));
}

TEST_CASE("memory limits of cgroups, version 1, also below the root of the hierarchy") {
  const std::string membership = "9:name=systemd:/\n4:cpuset,memory:/slurm/job_7\n3:cpu:/x\n0::/\n";
  CHECK(FakeCgroups(membership, {}).has(1 << 20));
  const FakeCgroups job(membership, {{"memory/memory.limit_in_bytes", "9223372036854771712\n"},
                                     {"memory/memory.usage_in_bytes", "50000\n"},
                                     {"memory/slurm/job_7/memory.limit_in_bytes", "9000\n"},
                                     {"memory/slurm/job_7/memory.usage_in_bytes", "2000\n"}});
  CHECK(job.has_just(7000));
  CHECK(job.usable() == 9000);
  // A container shows its own cgroup as the root.
  const FakeCgroups container("4:memory:/docker/c0ffee\n",
                              {{"memory/memory.limit_in_bytes", "9000\n"},
                               {"memory/memory.usage_in_bytes", "2000\n"},
                               {"memory/memory.stat",
                                "inactive_file 0\nactive_file 1\ntotal_inactive_file 400\n"
                                "total_active_file 100\n"}});
  CHECK(container.has_just(7500));
}
