#include "shm/memory_limit.h"

#include "catch.h"
#include "rank_threads.h"
#include "shm/mapping.h"

using namespace horon;
using namespace horon::testing;

namespace {

constexpr std::size_t kAbsurd = std::size_t{1} << 60;

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
