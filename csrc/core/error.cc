#include "core/error.h"

#include <system_error>

namespace horon {

std::string group_over_text(const std::string& reason) {
  return concat(reason, reason.ends_with('.') ? "" : ".",
                " The group can not be used any more; destroy it.");
}

std::string system_error_text(const char* call, int error_number) {
  return concat(call, ": ", std::generic_category().message(error_number));
}

}  // namespace horon
