#include "core/options.h"

#include <cstdlib>
#include <map>

#include "catch.h"
#include "rank_threads.h"

using namespace horon;
using namespace horon::testing;

namespace {

// Sets variables for a scope; what was there before comes back.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& values) {
    for (const char* variable :
         {"HORON_INLINE_BYTES", "HORON_BUFFER_BYTES", "HORON_RING_BYTES", "HORON_EAGER_BYTES",
          "HORON_HOST_ID", "HORON_ARENA_BYTES", "HORON_MOVE_THREADS", "HORON_SPARSE",
          "HORON_GRADIENTS_IN_PLACE", "HORON_LINGER_US", "HORON_HIERARCHICAL", "HORON_CARRIER"}) {
      if (const char* value = std::getenv(variable)) {
        before_[variable] = value;
      }
      const auto wanted = values.find(variable);
      wanted == values.end() ? ::unsetenv(variable) : ::setenv(variable, wanted->second.c_str(), 1);
      touched_.push_back(variable);
    }
  }
  ~Environment() {
    for (const std::string& variable : touched_) {
      const auto old = before_.find(variable);
      old == before_.end() ? ::unsetenv(variable.c_str())
                           : ::setenv(variable.c_str(), old->second.c_str(), 1);
    }
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::map<std::string, std::string> before_;
  std::vector<std::string> touched_;
};

}  // namespace

TEST_CASE("the defaults are valid, and an empty environment gives them") {
  const Environment environment({});
  const Options defaults;
  REQUIRE_NOTHROW(defaults.validate());
  REQUIRE(Options::from_environment().fingerprint() == defaults.fingerprint());
  REQUIRE(Options::from_environment().host_id.empty());
}

TEST_CASE("options come from the environment and empty variables count as unset") {
  const Environment environment({{"HORON_INLINE_BYTES", "0"},
                                 {"HORON_BUFFER_BYTES", "4096"},
                                 {"HORON_RING_BYTES", "8192"},
                                 {"HORON_EAGER_BYTES", "2048"},
                                 {"HORON_HOST_ID", "left"}});
  const Options options = Options::from_environment();
  REQUIRE(options.inline_bytes == 0);
  REQUIRE(options.buffer_bytes == 4096);
  REQUIRE(options.ring_bytes == 8192);
  REQUIRE(options.eager_bytes == 2048);
  REQUIRE(options.host_id == "left");
  const Environment empty({{"HORON_INLINE_BYTES", ""}, {"HORON_RING_BYTES", ""}});
  REQUIRE(Options::from_environment().fingerprint() == Options().fingerprint());
}

TEST_CASE("values that make no sense are refused by name") {
  struct Row {
    const char* variable;
    const char* value;
    const char* named;
  };
  for (const Row& row : {
           Row{"HORON_BUFFER_BYTES", "many", "HORON_BUFFER_BYTES"},
           Row{"HORON_BUFFER_BYTES", "4096k", "HORON_BUFFER_BYTES"},
           Row{"HORON_BUFFER_BYTES", " 4096", "HORON_BUFFER_BYTES"},
           Row{"HORON_INLINE_BYTES", "-64", "HORON_INLINE_BYTES"},
           Row{"HORON_RING_BYTES", "99999999999999999999999", "HORON_RING_BYTES"},
           Row{"HORON_BUFFER_BYTES", "64", "buffer_bytes"},
           Row{"HORON_BUFFER_BYTES", "4097", "buffer_bytes"},
           Row{"HORON_BUFFER_BYTES", "1073741888", "buffer_bytes"},
           Row{"HORON_INLINE_BYTES", "65", "inline_bytes"},
           Row{"HORON_RING_BYTES", "64", "ring_bytes"},
           Row{"HORON_EAGER_BYTES", "65536", "eager_bytes"},
           Row{"HORON_EAGER_BYTES", "100", "eager_bytes"},
       }) {
    const Environment environment(std::map<std::string, std::string>{{row.variable, row.value}});
    INFO(row.variable << "=" << row.value);
    const std::exception_ptr error = error_of([] { Options::from_environment(); });
    REQUIRE(threw<UsageError>(error));
    REQUIRE(contains(text_of(error), row.named));
  }
}

TEST_CASE("the arena's size comes from the environment") {
  const Environment empty({});
  REQUIRE_FALSE(arena_bytes_from_environment());
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{1} << 46}) {
    const Environment environment(
        std::map<std::string, std::string>{{"HORON_ARENA_BYTES", std::to_string(bytes)}});
    REQUIRE(arena_bytes_from_environment() == bytes);
  }
  for (const char* value : {"all", "-1", "1g", "70368744177665"}) {
    const Environment environment(std::map<std::string, std::string>{{"HORON_ARENA_BYTES", value}});
    const std::exception_ptr error = error_of([] { arena_bytes_from_environment(); });
    INFO(value);
    REQUIRE(threw<UsageError>(error));
    REQUIRE(contains(text_of(error), "HORON_ARENA_BYTES"));
  }
}

TEST_CASE("whether threads may be moved comes from the environment") {
  for (const auto& [value, expected] :
       std::map<std::string, bool>{{"", true}, {"on", true}, {"off", false}}) {
    const Environment environment(
        std::map<std::string, std::string>{{"HORON_MOVE_THREADS", value}});
    REQUIRE(may_move_threads_from_environment() == expected);
  }
  const Environment environment(std::map<std::string, std::string>{{"HORON_MOVE_THREADS", "no"}});
  const std::exception_ptr error = error_of([] { may_move_threads_from_environment(); });
  REQUIRE(threw<UsageError>(error));
  REQUIRE(contains(text_of(error), "HORON_MOVE_THREADS: expected on or off, got 'no'"));
}

TEST_CASE("how long waits linger comes from the environment") {
  for (const auto& [value, expected] :
       std::map<std::string, int>{{"", 10'000}, {"0", 0}, {"250", 250}, {"50000", 50'000}}) {
    const Environment environment(std::map<std::string, std::string>{{"HORON_LINGER_US", value}});
    REQUIRE(linger_time_from_environment() == std::chrono::microseconds(expected));
  }
  for (const char* value : {"on", "-1", "1.5", "50001"}) {
    const Environment environment(std::map<std::string, std::string>{{"HORON_LINGER_US", value}});
    const std::exception_ptr error = error_of([] { linger_time_from_environment(); });
    INFO(value);
    REQUIRE(threw<UsageError>(error));
    REQUIRE(contains(text_of(error), "HORON_LINGER_US"));
    REQUIRE(contains(text_of(error), value));
  }
}

TEST_CASE("whether gradients are made in their places comes from the environment") {
  for (const auto& [value, expected] :
       std::map<std::string, bool>{{"", true}, {"on", true}, {"off", false}}) {
    const Environment environment(
        std::map<std::string, std::string>{{"HORON_GRADIENTS_IN_PLACE", value}});
    REQUIRE(gradients_in_place_from_environment() == expected);
  }
  const Environment environment(
      std::map<std::string, std::string>{{"HORON_GRADIENTS_IN_PLACE", "1"}});
  const std::exception_ptr error = error_of([] { gradients_in_place_from_environment(); });
  REQUIRE(threw<UsageError>(error));
  REQUIRE(contains(text_of(error), "HORON_GRADIENTS_IN_PLACE: expected on or off, got '1'"));
}

TEST_CASE("rings of a group get less the more ranks there are") {
  const std::vector<std::pair<int, std::size_t>> expected{{1, std::size_t{2} << 20},
                                                          {2, std::size_t{2} << 20},
                                                          {3, 21 * 65536},
                                                          {4, 10 * 65536},
                                                          {8, 2 * 65536},
                                                          {9, 65536},
                                                          {16, 65536},
                                                          {4096, 65536}};
  for (const auto& [n_ranks, bytes] : expected) {
    INFO(n_ranks << " ranks");
    REQUIRE(automatic_ring_bytes(n_ranks) == bytes);
  }
}

TEST_CASE("an eager message always fits into the ring beside others") {
  Options options;
  options.eager_bytes = kLeastAutomaticRingBytes / 4;  // the ring as small as it may become
  REQUIRE_NOTHROW(options.validate());
  options.eager_bytes += 64;
  REQUIRE_THROWS_AS(options.validate(), UsageError);
  options.ring_bytes = 4096;
  options.eager_bytes = 1024;
  REQUIRE_NOTHROW(options.validate());
  REQUIRE(options.fitting_eager_bytes() == 1024);
  options.eager_bytes = 1088;
  REQUIRE_THROWS_AS(options.validate(), UsageError);
  options.eager_bytes = Options().eager_bytes;  // who sets the ring alone need not think of this
  REQUIRE_NOTHROW(options.validate());
  REQUIRE(options.fitting_eager_bytes() == 1024);
  REQUIRE(Options().fitting_eager_bytes() == Options().eager_bytes);
}

TEST_CASE("the fingerprint tells all settings apart but the host") {
  const Options base;
  Options other = base;
  other.host_id = "elsewhere";
  REQUIRE(other.fingerprint() == base.fingerprint());
  for (std::size_t Options::* field :
       {&Options::inline_bytes, &Options::buffer_bytes, &Options::ring_bytes, &Options::eager_bytes,
        &Options::cuda_batch_bytes}) {
    other = base;
    other.*field += 64;
    REQUIRE(other.fingerprint() != base.fingerprint());
  }
}
