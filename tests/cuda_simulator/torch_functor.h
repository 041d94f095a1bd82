// What torch's elementwise kernels do with each element, by the name of the function object.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "torch_element.h"

namespace horon::simulator {

struct Functor {
  using Apply = std::function<Value(const Value* arguments)>;

  const ElementType* result;
  std::vector<const ElementType*> arguments;
  std::size_t object_bytes;
  // Reads the function object, whose members are torch's (ATen/native/cuda/Loops.cuh and beside
  // it).
  std::function<Apply(const char* object)> bind;
};

// None for one that is not known.
std::optional<Functor> find_functor(const std::string& name);

}  // namespace horon::simulator
