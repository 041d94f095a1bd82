// Element types of torch's kernels, and values of any of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace horon::simulator {

// A number on its way from one element to another: an integer, or a double, which holds every value
// of the floating-point types. What torch computes in float is computed in double here and rounded
// once; of
// +, -, * and / the results are the same.
struct Value {
  bool is_integer = false;
  std::int64_t integer = 0;
  double real = 0;

  static Value of(std::int64_t value) { return {true, value, 0}; }
  static Value of(double value) { return {false, 0, value}; }
  double as_real() const { return is_integer ? static_cast<double>(integer) : real; }
  std::int64_t as_integer() const { return is_integer ? integer : static_cast<std::int64_t>(real); }
};

struct ElementType {
  std::string_view name;  // as demangled
  int scalar_type;        // the number in c10::ScalarType
  std::size_t bytes;
  Value (*load)(const char* from);
  void (*store)(const Value& value, char* to);
};

// Null for one that is not known.
const ElementType* find_element(std::string_view name);
const ElementType* find_element(int scalar_type);
// The type that torch computes in: float for the narrower ones.
const ElementType* compute_type(const ElementType* type);

}  // namespace horon::simulator
