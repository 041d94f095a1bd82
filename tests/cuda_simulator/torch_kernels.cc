// torch's elementwise kernels (ATen/native/cuda/CUDALoops.cuh), one element after another:
//
//   vectorized_elementwise_kernel(N, functor, addresses)
//   unrolled_elementwise_kernel(N, functor, addresses, offsets, offset, loader, storer)
//   elementwise_kernel(N, closure of offset calculator, addresses and functor), for strided tensors
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "kernels.h"
#include "template_name.h"
#include "torch_functor.h"

namespace horon::simulator {
namespace {

constexpr std::size_t kMaxTensors = 3;  // the result and two arguments

// The bytes between elements of each tensor, in each dimension.
struct Walk {
  struct Dimension {
    std::uint32_t size;
    std::array<std::size_t, kMaxTensors> bytes;
  };
  std::vector<Dimension> dimensions;  // the fastest first

  std::array<std::size_t, kMaxTensors> offsets(std::uint32_t i) const {
    std::array<std::size_t, kMaxTensors> at{};
    for (const Dimension& dimension : dimensions) {
      const std::uint32_t index = i % dimension.size;
      i /= dimension.size;
      for (std::size_t tensor = 0; tensor < kMaxTensors; ++tensor) {
        at[tensor] += index * dimension.bytes[tensor];
      }
    }
    return at;
  }
};

// One launch: the first tensor is the result.
struct Elementwise {
  std::uint32_t count;
  std::array<char*, kMaxTensors> addresses;
  std::vector<const ElementType*> types;
  Functor functor;
  Functor::Apply apply;
  Walk walk;

  void run() const {
    std::array<char, 8> narrowed;
    std::array<Value, kMaxTensors> arguments;
    for (std::uint32_t i = 0; i < count; ++i) {
      const auto at = walk.offsets(i);
      for (std::size_t k = 1; k < types.size(); ++k) {
        // What is stored as another type is first converted to the functor's.
        functor.arguments[k - 1]->store(types[k]->load(addresses[k] + at[k]), narrowed.data());
        arguments[k - 1] = functor.arguments[k - 1]->load(narrowed.data());
      }
      functor.result->store(apply(arguments.data()), narrowed.data());
      types[0]->store(functor.result->load(narrowed.data()), addresses[0] + at[0]);
    }
  }
};

std::vector<const ElementType*> types_of(const Functor& functor) {
  std::vector<const ElementType*> types{functor.result};
  types.insert(types.end(), functor.arguments.begin(), functor.arguments.end());
  return types;
}

Walk contiguous_walk(std::uint32_t count, const std::vector<const ElementType*>& types) {
  Walk::Dimension all{count, {}};
  for (std::size_t i = 0; i < types.size(); ++i) {
    all.bytes[i] = types[i]->bytes;
  }
  return {{all}};
}

std::array<char*, kMaxTensors> addresses_at(const void* from, std::size_t n_tensors) {
  std::array<char*, kMaxTensors> addresses{};
  std::memcpy(addresses.data(), from, n_tensors * sizeof(char*));
  return addresses;
}

std::function<void()> work_of(Elementwise launch) {
  auto kept = std::make_shared<const Elementwise>(std::move(launch));
  return [kept = std::move(kept)] { kept->run(); };
}

// A c10::ScalarType, which is one byte.
const ElementType* stored_type(const char* at) {
  const ElementType* type = find_element(static_cast<int>(*at));
  if (type == nullptr) {
    end_for_unknown("(one that casts from or to scalar type " + std::to_string(*at) + ")");
  }
  return type;
}

std::function<void()> contiguous_work(const Functor& functor, const Launch& launch,
                                      const std::vector<const ElementType*>& types) {
  const auto count = static_cast<std::uint32_t>(launch.argument<int>(0));
  return work_of({.count = count,
                  .addresses = addresses_at(launch.arguments[2], types.size()),
                  .types = types,
                  .functor = functor,
                  .apply = functor.bind(&launch.argument<char>(1)),
                  .walk = contiguous_walk(count, types)});
}

// vectorized_elementwise_kernel<width, functor, addresses, ...>
HostKernel find_vectorized(const TemplateName& parsed) {
  const auto functor = find_functor(parsed.arguments.at(1));
  if (!functor) {
    return nullptr;
  }
  return [functor = *functor](const Launch& launch) {
    return contiguous_work(functor, launch, types_of(functor));
  };
}

// unrolled_elementwise_kernel<functor, addresses, n, offsets, offset, loader, storer>: the loader
// and the storer may name other types than the functor has, by the numbers that begin them.
HostKernel find_unrolled(const TemplateName& parsed) {
  const auto functor = find_functor(parsed.arguments.at(0));
  const auto is_trivial = [&](std::size_t i) {
    return parsed.arguments.at(i).starts_with("TrivialOffsetCalculator<");
  };
  if (!functor || !is_trivial(3) || !is_trivial(4)) {
    return nullptr;
  }
  const auto casts = [&](std::size_t i) {
    return parsed.arguments.at(i).find("WithCast<") != std::string::npos;
  };
  return [functor = *functor, loads = casts(5), stores = casts(6)](const Launch& launch) {
    std::vector<const ElementType*> types = types_of(functor);
    for (std::size_t i = 1; i < types.size() && loads; ++i) {
      types[i] = stored_type(&launch.argument<char>(5) + i - 1);
    }
    if (stores) {
      types[0] = stored_type(&launch.argument<char>(6));
    }
    return contiguous_work(functor, launch, types);
  };
}

// OffsetCalculator<n>: int dims; {uint32 divisor, magic, shift} sizes[25]; uint32 strides[25][n].
constexpr std::size_t kMaxDimensions = 25;
constexpr std::size_t kSizeBytes = 3 * sizeof(std::uint32_t);

std::size_t offset_calculator_bytes(std::size_t n_tensors) {
  return sizeof(int) + kMaxDimensions * (kSizeBytes + n_tensors * sizeof(std::uint32_t));
}

Walk strided_walk(const char* calculator, std::size_t n_tensors) {
  const auto word = [calculator](std::size_t offset) {
    std::uint32_t value;
    std::memcpy(&value, calculator + offset, sizeof value);
    return value;
  };
  Walk walk;
  const std::size_t n_dimensions = word(0);
  const std::size_t strides = sizeof(int) + kMaxDimensions * kSizeBytes;
  for (std::size_t i = 0; i < n_dimensions; ++i) {
    Walk::Dimension dimension{word(sizeof(int) + i * kSizeBytes), {}};
    for (std::size_t tensor = 0; tensor < n_tensors; ++tensor) {
      dimension.bytes[tensor] = word(strides + (i * n_tensors + tensor) * sizeof(std::uint32_t));
    }
    walk.dimensions.push_back(dimension);
  }
  return walk;
}

// elementwise_kernel<128, n, gpu_kernel_impl_nocast<functor>(...)::{lambda(int)#1}>, or
// gpu_kernel_impl<...>, which casts: its closure ends with the types of the tensors.
HostKernel find_strided(const TemplateName& parsed) {
  const auto closure = parse_template(parsed.arguments.at(2));
  if (!closure || !closure->rest.ends_with("::{lambda(int)#1}")) {
    return nullptr;
  }
  const bool casts = closure->name == "at::native::gpu_kernel_impl";
  const auto functor = find_functor(closure->arguments.at(0));
  if (!functor || (!casts && closure->name != "at::native::gpu_kernel_impl_nocast")) {
    return nullptr;
  }
  return [functor = *functor, casts](const Launch& launch) {
    std::vector<const ElementType*> types = types_of(functor);
    const char* const calculator = &launch.argument<char>(1);
    const char* const addresses = calculator + (offset_calculator_bytes(types.size()) + 7) / 8 * 8;
    const char* const object = addresses + types.size() * sizeof(char*);
    for (std::size_t i = 0; i < types.size() && casts; ++i) {
      types[i] = stored_type(object + functor.object_bytes + i);
    }
    return work_of({.count = static_cast<std::uint32_t>(launch.argument<int>(0)),
                    .addresses = addresses_at(addresses, types.size()),
                    .types = types,
                    .functor = functor,
                    .apply = functor.bind(object),
                    .walk = strided_walk(calculator, types.size())});
  };
}

// spin_kernel(cycles), which is torch.cuda._sleep: at the clock rate that the device claims to
// have.
HostKernel find_spin(const std::string& name) {
  if (name != "at::cuda::(anonymous namespace)::spin_kernel(long)") {
    return nullptr;
  }
  constexpr double kCyclesPerMicrosecond = 1980;
  return [](const Launch& launch) {
    const auto us = static_cast<double>(launch.argument<std::int64_t>(0)) / kCyclesPerMicrosecond;
    return [us] { std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us)); };
  };
}

}  // namespace

HostKernel find_torch_kernel(const std::string& name) {
  if (HostKernel spin = find_spin(name)) {
    return spin;
  }
  const auto parsed = parse_template(name);
  if (!parsed) {
    return nullptr;
  }
  if (parsed->name == "void at::native::vectorized_elementwise_kernel") {
    return find_vectorized(*parsed);
  }
  if (parsed->name == "void at::native::unrolled_elementwise_kernel") {
    return find_unrolled(*parsed);
  }
  if (parsed->name == "void at::native::elementwise_kernel") {
    return find_strided(*parsed);
  }
  return nullptr;
}

}  // namespace horon::simulator
