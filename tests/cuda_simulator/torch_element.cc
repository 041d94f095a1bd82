#include "torch_element.h"

#include <cstring>
#include <type_traits>

#include "cuda/half_bits.h"
#include "float8.h"

namespace horon::simulator {
namespace {

template <class T>
Value value_of(T element) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
    return Value::of(static_cast<double>(to_float(element)));
  } else if constexpr (std::is_integral_v<T>) {
    return Value::of(static_cast<std::int64_t>(element));
  } else if constexpr (std::is_floating_point_v<T>) {
    return Value::of(static_cast<double>(element));
  } else {
    return Value::of(static_cast<double>(static_cast<float>(element)));
  }
}

template <class T>
T element_of(const Value& value) {
  if constexpr (std::is_same_v<T, Float16>) {
    return to_float16(static_cast<float>(value.as_real()));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return to_bfloat16(static_cast<float>(value.as_real()));
  } else if constexpr (std::is_same_v<T, bool>) {
    return value.is_integer ? value.integer != 0 : value.real != 0;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(value.as_integer());
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(value.as_real());
  } else {
    return T::from(static_cast<float>(value.as_real()));
  }
}

template <class T>
constexpr ElementType element_type(std::string_view name, int scalar_type) {
  return {name, scalar_type, sizeof(T),
          [](const char* from) {
            T element;
            std::memcpy(&element, from, sizeof element);
            return value_of(element);
          },
          [](const Value& value, char* to) {
            const T element = element_of<T>(value);
            std::memcpy(to, &element, sizeof element);
          }};
}

constexpr ElementType kTypes[] = {
    element_type<std::uint8_t>("unsigned char", 0),
    element_type<std::int8_t>("signed char", 1),
    element_type<std::int16_t>("short", 2),
    element_type<std::int32_t>("int", 3),
    element_type<std::int64_t>("long", 4),
    element_type<Float16>("c10::Half", 5),
    element_type<float>("float", 6),
    element_type<double>("double", 7),
    element_type<bool>("bool", 11),
    element_type<BFloat16>("c10::BFloat16", 15),
    element_type<Float8E5M2>("c10::Float8_e5m2", 23),
    element_type<Float8E4M3>("c10::Float8_e4m3fn", 24),
};

}  // namespace

const ElementType* find_element(std::string_view name) {
  for (const ElementType& type : kTypes) {
    if (type.name == name) {
      return &type;
    }
  }
  return nullptr;
}

const ElementType* find_element(int scalar_type) {
  for (const ElementType& type : kTypes) {
    if (type.scalar_type == scalar_type) {
      return &type;
    }
  }
  return nullptr;
}

const ElementType* compute_type(const ElementType* type) {
  return type != nullptr && type->name.starts_with("c10::") ? find_element("float") : type;
}

}  // namespace horon::simulator
