// Entry point of horon_tests, the same for Catch2 2 and 3 (tests/cpp/CMakeLists.txt provides the
// header).
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>

int main(int argc, char* argv[]) { return Catch::Session().run(argc, argv); }
