// Moves the elements of one container behind those of another.
#pragma once

#include <algorithm>
#include <iterator>
#include <utility>

namespace horon::torch_backend {

template <class Vector>
void append(Vector& to, Vector& from) {
  if (to.empty()) {
    to = std::move(from);
    return;
  }
  to.reserve(to.size() + from.size());
  std::move(from.begin(), from.end(), std::back_inserter(to));
}

}  // namespace horon::torch_backend
