#include "torch_functor.h"

#include <cmath>

#include "template_name.h"

namespace horon::simulator {
namespace {

using Binary = Value (*)(const Value& a, const Value& b);

Value multiply(const Value& a, const Value& b) {
  return a.is_integer && b.is_integer
             ? Value::of(static_cast<std::int64_t>(static_cast<std::uint64_t>(a.integer) *
                                                   static_cast<std::uint64_t>(b.integer)))
             : Value::of(a.as_real() * b.as_real());
}

Value divide(const Value& a, const Value& b) { return Value::of(a.as_real() / b.as_real()); }

Value add(const Value& a, const Value& b) {
  return a.is_integer && b.is_integer
             ? Value::of(static_cast<std::int64_t>(static_cast<std::uint64_t>(a.integer) +
                                                   static_cast<std::uint64_t>(b.integer)))
             : Value::of(a.as_real() + b.as_real());
}

bool ends_with(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// A function without members.
Functor stateless(const ElementType* result, std::vector<const ElementType*> arguments,
                  Functor::Apply apply) {
  return {result, std::move(arguments), 1,
          [apply = std::move(apply)](const char*) { return apply; }};
}

std::optional<Functor> find_fill(const ElementType* type) {
  return Functor{type, {}, type->bytes, [type](const char* object) -> Functor::Apply {
                   return [value = type->load(object)](const Value*) { return value; };
                 }};
}

// Converts, perhaps from a type to itself.
Functor conversion(const ElementType* from, const ElementType* to) {
  return stateless(to, {from}, [](const Value* arguments) { return arguments[0]; });
}

// self + alpha * other, where one of the two may be a member in front of alpha.
enum class Addend { kBothArguments, kSelfIsArgument, kOtherIsArgument };

std::optional<Functor> find_add(const ElementType* type, Addend which) {
  const ElementType* const compute = compute_type(type);
  const bool has_member = which != Addend::kBothArguments;
  std::vector<const ElementType*> arguments(has_member ? 1 : 2, type);
  return Functor{type, std::move(arguments), (has_member ? 2 : 1) * compute->bytes,
                 [=](const char* object) -> Functor::Apply {
                   const Value member = compute->load(object);
                   const Value alpha = compute->load(object + (has_member ? compute->bytes : 0));
                   return [=](const Value* arguments) {
                     const Value& self = which == Addend::kOtherIsArgument ? member : arguments[0];
                     const Value& other = which == Addend::kBothArguments    ? arguments[1]
                                          : which == Addend::kSelfIsArgument ? member
                                                                             : arguments[0];
                     return add(self, multiply(alpha, other));
                   };
                 }};
}

Binary find_binary(const std::string& name) {
  if (name.find("binary_internal::MulFunctor<") != std::string::npos) {
    return multiply;
  }
  if (name.find("binary_internal::DivFunctor<") != std::string::npos) {
    return divide;
  }
  return nullptr;
}

// AUnaryFunctor, BUnaryFunctor, BinaryFunctor<first, second, result, operation>. The first two have
// the operation, which is empty, and one operand as members.
std::optional<Functor> find_wrapped(const TemplateName& parsed) {
  if (parsed.arguments.size() != 4) {
    return std::nullopt;
  }
  const ElementType* const first = find_element(parsed.arguments[0]);
  const ElementType* const second = find_element(parsed.arguments[1]);
  const ElementType* const result = find_element(parsed.arguments[2]);
  const Binary operation = find_binary(parsed.arguments[3]);
  if (first == nullptr || second == nullptr || result == nullptr || operation == nullptr) {
    return std::nullopt;
  }
  if (ends_with(parsed.name, "::BinaryFunctor")) {
    return stateless(result, {first, second}, [operation](const Value* arguments) {
      return operation(arguments[0], arguments[1]);
    });
  }
  const bool is_first_bound = ends_with(parsed.name, "::AUnaryFunctor");
  const ElementType* const bound = compute_type(is_first_bound ? first : second);
  return Functor{result,
                 {is_first_bound ? second : first},
                 2 * bound->bytes,
                 [=](const char* object) -> Functor::Apply {
                   const Value member = bound->load(object + bound->bytes);
                   return [=](const Value* arguments) {
                     return is_first_bound ? operation(member, arguments[0])
                                           : operation(arguments[0], member);
                   };
                 }};
}

std::optional<Functor> find_by_type(const std::string& name, const ElementType* type) {
  if (ends_with(name, "::FillFunctor")) {
    return find_fill(type);
  }
  if (ends_with(name, "::CUDAFunctor_add")) {
    return find_add(type, Addend::kBothArguments);
  }
  if (ends_with(name, "::CUDAFunctorOnSelf_add")) {
    return find_add(type, Addend::kSelfIsArgument);
  }
  if (ends_with(name, "::CUDAFunctorOnOther_add")) {
    return find_add(type, Addend::kOtherIsArgument);
  }
  if (ends_with(name, "::ConvertToFloat8E4M3fnOp")) {
    return conversion(type, find_element("c10::Float8_e4m3fn"));
  }
  if (ends_with(name, "::AbsFunctor")) {
    return stateless(type, {type}, [](const Value* arguments) {
      return arguments[0].is_integer ? Value::of(std::abs(arguments[0].integer))
                                     : Value::of(std::fabs(arguments[0].real));
    });
  }
  return std::nullopt;
}

// at::native::direct_copy_kernel_cuda(...)::{lambda()#3}::...::{lambda(float)#1}
std::optional<Functor> find_direct_copy(const std::string& name) {
  if (!name.starts_with("at::native::direct_copy_kernel_cuda(") || !ends_with(name, ")#1}")) {
    return std::nullopt;
  }
  constexpr std::string_view kLambda = "{lambda(";
  const std::size_t begin = name.rfind(kLambda) + kLambda.size();
  const ElementType* type = find_element(name.substr(begin, name.size() - 4 - begin));
  return type == nullptr ? std::nullopt : std::optional(conversion(type, type));
}

}  // namespace

std::optional<Functor> find_functor(const std::string& name) {
  if (auto found = find_direct_copy(name)) {
    return found;
  }
  if (name == "at::native::ConvertFloatToFloat8E5M2Op") {
    return conversion(find_element("float"), find_element("c10::Float8_e5m2"));
  }
  // Before torch 2.15.
  if (name == "at::native::float16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}") {
    return conversion(find_element("float"), find_element("c10::Half"));
  }
  if (name == "at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}") {
    return conversion(find_element("float"), find_element("c10::BFloat16"));
  }
  const std::optional<TemplateName> parsed = parse_template(name);
  if (!parsed) {
    return std::nullopt;
  }
  if (parsed->name == "at::native::converting_copy_kernel_cuda" && parsed->arguments.size() == 2) {
    const ElementType* const from = find_element(parsed->arguments[0]);
    const ElementType* const to = find_element(parsed->arguments[1]);
    return from == nullptr || to == nullptr ? std::nullopt : std::optional(conversion(from, to));
  }
  if (parsed->arguments.size() == 1 && parsed->rest.empty()) {
    const ElementType* const type = find_element(parsed->arguments[0]);
    return type == nullptr ? std::nullopt : find_by_type(parsed->name, type);
  }
  return find_wrapped(*parsed);
}

}  // namespace horon::simulator
