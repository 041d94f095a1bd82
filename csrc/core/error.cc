#include "core/error.h"

#include <cerrno>
#include <system_error>

namespace horon {

std::string group_over_text(const std::string& reason) {
  return concat(reason, reason.ends_with('.') ? "" : ".",
                " The group can not be used any more; destroy it.");
}

namespace {

// The setting to look at, for errors whose text does not lead there.
const char* limit_behind(int error_number) {
  switch (error_number) {
    case EMFILE:
      return " (this process may not open more: ulimit -n)";
    case ENFILE:
      return " (nobody on this machine can open more: fs.file-max)";
    case EFBIG:
      return " (ulimit -f)";
    default:
      return "";
  }
}

}  // namespace

std::string system_error_text(const char* call, int error_number) {
  return concat(call, ": ", std::generic_category().message(error_number),
                limit_behind(error_number));
}

}  // namespace horon
