#include "core/error.h"

#include <system_error>

namespace horon {

std::string system_error_text(const char* call, int error_number) {
  return concat(call, ": ", std::generic_category().message(error_number));
}

}  // namespace horon
