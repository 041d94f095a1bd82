#include "shm/mapping.h"

#include <sys/resource.h>

#include "catch.h"
#include "in_child.h"
#include "rank_threads.h"

using namespace horon;
using namespace horon::testing;

TEST_CASE("a process that may open no more files is told so when it asks for shared memory") {
  if (kHasAddressSanitizer) {
    return;  // its partner for undefined behaviour needs descriptors to look at memory
  }
  const int is_told = in_child([] {
    const rlimit none{0, 0};
    if (::setrlimit(RLIMIT_NOFILE, &none) != 0) {
      return 2;
    }
    const std::exception_ptr error = error_of([] { create_shared_file(4096, 4096); });
    const bool is_clear = threw<Error>(error) && contains(text_of(error), "memfd_create") &&
                          contains(text_of(error), "ulimit -n") &&
                          !contains(text_of(error), "/dev/shm");
    return is_clear ? 0 : 1;
  });
  REQUIRE(is_told == 0);
}
