#include "backend_options.h"

#include "errors.h"

namespace horon::torch_backend {

horon::Options BackendOptions::engine_options() {
  try {
    return horon::Options::from_environment();
  } catch (...) {
    rethrow_translated();
  }
}

}  // namespace horon::torch_backend
