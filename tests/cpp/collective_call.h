// One collective of a test: its plan, which all ranks know, and a rank's side of it with the
// expected result, computed by plain code.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/request.h"
#include "reduce/reduce.h"
#include "reduce_reference.h"

namespace horon::testing {

using Bytes = std::vector<std::byte>;

// Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.
struct SplitMix {
  std::uint64_t state;

  std::uint64_t operator()() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
};

// What a collective does. All ranks build it alike, except where a mismatch is wanted.
struct Plan {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int n_ranks = 1;
  int root = 0;
  std::uint64_t count = 0;
  bool is_uneven = false;     // ranks send different numbers of elements where the kind allows it
  bool adds_exactly = false;  // real numbers whose sums do not depend on the order
  bool is_in_place = false;   // outputs lie in the inputs where the kind allows it
  std::uint64_t batch_digest = 0;
  unsigned seed = 0;
  std::string refusal;

  std::size_t element() const { return element_bytes(dtype); }

  // Elements that `source` sends to `destination`; of reductions to one tensor: `count`.
  std::uint64_t sent(int source, int destination) const {
    const auto part = [&](int i) {
      return !is_uneven ? count : i % 3 == 1 ? 0 : count + static_cast<std::uint64_t>(i);
    };
    switch (kind) {
      case OpKind::kBroadcast:
        return source == root && destination != root ? count : 0;
      case OpKind::kAllGather:
        return part(source);
      case OpKind::kGather:
        return destination == root ? part(source) : 0;
      case OpKind::kGatherSingle:
        return destination == root ? count : 0;
      case OpKind::kScatter:
        return source == root ? part(destination) : 0;
      case OpKind::kReduceScatter:
      case OpKind::kReduceScatterSingle:
        return part(destination);
      case OpKind::kAllToAll:
      case OpKind::kAllToAllSingle:
        return part(source + 2 * destination);
      default:
        return count;
    }
  }

  double factor(int rank) const { return 0.5 + rank * 1.25; }

  // What `source` sends to `destination`. Real numbers are small multiples of a quarter.
  Bytes data(int source, int destination) const {
    const bool is_shared = has_shared_input(kind) || pattern(kind) == Pattern::kReduceToAll ||
                           pattern(kind) == Pattern::kReduceToRoot;
    const int stream = is_shared ? 0 : destination + 1;
    SplitMix random{seed * std::uint64_t{7919} + static_cast<unsigned>(source * 131 + stream)};
    const std::uint64_t elements =
        is_shared && kind == OpKind::kBroadcast ? count : sent(source, destination);
    Bytes bytes(elements * element());
    // One of 32 values at each place. The loops are plain: under sanitizers they are most of the
    // time that some tests take.
    const auto fill = [&](auto make) {
      using Value = decltype(make(0));
      std::array<Value, 32> values;
      for (int i = 0; i < 32; ++i) {
        values[static_cast<std::size_t>(i)] = make(i - 16);
      }
      std::byte* const data = bytes.data();
      const std::size_t n = bytes.size() / sizeof(Value);
      std::uint64_t bits = 0;
      for (std::size_t i = 0; i < n; ++i, bits >>= 5) {
        bits = i % 12 == 0 ? random() : bits;
        std::memcpy(data + i * sizeof(Value), &values[bits % 32], sizeof(Value));
      }
    };
    switch (dtype) {
      case DType::kFloat16:
        fill([](int i) { return reference::kFloat16.encode(static_cast<float>(i) / 4); });
        break;
      case DType::kBFloat16:
        fill([](int i) { return reference::kBFloat16.encode(static_cast<float>(i) / 4); });
        break;
      case DType::kFloat32:
      case DType::kComplex64:
        fill([this](int i) { return static_cast<float>(i) / 4 + (adds_exactly ? 0 : 0.1f); });
        break;
      case DType::kFloat64:
      case DType::kComplex128:
        fill([this](int i) { return static_cast<double>(i) / 4 + (adds_exactly ? 0 : 0.1); });
        break;
      case DType::kBool:
        fill([](int i) { return static_cast<std::uint8_t>(i & 1); });
        break;
      default:
        for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
          const std::uint64_t bits = random();
          std::memcpy(bytes.data() + at, &bits, std::min(sizeof(bits), bytes.size() - at));
        }
    }
    return bytes;
  }

  // The reduction of what all ranks send to `destination`.
  Bytes reduced(int destination) const {
    std::vector<Bytes> inputs;
    std::vector<const void*> sources;
    std::vector<double> factors;
    for (int source = 0; source < n_ranks; ++source) {
      inputs.push_back(data(source, destination));
      factors.push_back(factor(source));
    }
    for (const Bytes& input : inputs) {
      sources.push_back(input.data());
    }
    Bytes result(inputs[0].size());
    reference::reduce(result.data(), sources, result.size() / element(), dtype, op, factors.data());
    return result;
  }
};

// The sum of so many floats, of each rank.
inline Plan all_reduce_plan(int n_ranks, std::uint64_t count) {
  Plan plan;
  plan.kind = OpKind::kAllReduce;
  plan.n_ranks = n_ranks;
  plan.count = count;
  return plan;
}

// One rank's tensors and request. Not movable: the request points into it.
class RankCall {
 public:
  RankCall(const Plan& plan, int rank) : plan_(plan), rank_(rank) {
    request.kind = plan.kind;
    request.dtype = plan.dtype;
    request.op = plan.op;
    request.type_code = static_cast<std::uint8_t>(plan.dtype);
    request.element_bytes = plan.element();
    request.root = plan.root;
    request.factor = plan.factor(rank);
    request.batch_digest = plan.batch_digest;
    request.refusal = plan.refusal;
    switch (pattern(plan.kind)) {
      case Pattern::kNone:
        break;
      case Pattern::kReduceToAll:
      case Pattern::kReduceToRoot:
        build_reduction();
        break;
      default:
        build_exchange();
    }
  }
  RankCall(const RankCall&) = delete;
  RankCall& operator=(const RankCall&) = delete;

  // "" when all outputs are as they should be.
  std::string check_result() const {
    for (std::size_t i = 0; i < request.outputs.size(); ++i) {
      const Span& output = request.outputs[i];
      if (output.bytes != expected_[i].size()) {
        return concat("output ", i, " has ", output.bytes, " bytes, expected ",
                      expected_[i].size());
      }
      if (output.bytes > 0 && std::memcmp(output.data, expected_[i].data(), output.bytes) != 0) {
        const auto differing =
            std::mismatch(expected_[i].begin(), expected_[i].end(), output.data).first;
        return concat("output ", i, " differs from byte ", differing - expected_[i].begin(), " on");
      }
    }
    return "";
  }

  // "" when nothing was written.
  std::string check_untouched() const {
    for (std::size_t i = 0; i < request.outputs.size(); ++i) {
      const Span& output = request.outputs[i];
      if (output.bytes > 0 && std::memcmp(output.data, before_[i].data(), output.bytes) != 0) {
        return concat("output ", i, " was written to");
      }
    }
    return "";
  }

  std::string describe() const {
    return concat(name(plan_.kind), " of ", plan_.count, ' ', name(plan_.dtype), ' ',
                  name(plan_.op), " root ", plan_.root, plan_.is_uneven ? " uneven" : "",
                  plan_.is_in_place ? " in place" : "", " on rank ", rank_, " of ", plan_.n_ranks);
  }

  Request request;

 private:
  void build_reduction() {
    request.count = plan_.count;
    inputs_.push_back(plan_.data(rank_, 0));
    request.inputs = {view(inputs_[0])};
    if (pattern(plan_.kind) == Pattern::kReduceToAll || rank_ == plan_.root) {
      add_output(plan_.reduced(0), plan_.is_in_place ? &inputs_[0] : nullptr);
    }
  }

  void build_exchange() {
    const auto n = static_cast<std::size_t>(plan_.n_ranks);
    const bool reduces = pattern(plan_.kind) == Pattern::kReduceScatter;
    request.count = plan_.kind == OpKind::kBroadcast ? plan_.count : plan_.sent(rank_, rank_);
    inputs_.resize(n);
    outputs_.reserve(n);
    for (int peer = 0; peer < plan_.n_ranks; ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      request.send_counts.push_back(plan_.sent(rank_, peer));
      request.recv_counts.push_back(plan_.sent(peer, rank_));
      // Input that is the same for all is one tensor.
      const std::size_t from = has_shared_input(plan_.kind) ? 0 : p;
      if (from == p) {
        inputs_[p] = plan_.data(rank_, peer);
      }
      const bool is_sent = request.send_counts.back() > 0;
      request.inputs.push_back(is_sent ? view(inputs_[from]) : ConstSpan{});
    }
    const std::size_t own = has_shared_input(plan_.kind) ? 0 : static_cast<std::size_t>(rank_);
    Bytes* in_place = plan_.is_in_place && !inputs_[own].empty() ? &inputs_[own] : nullptr;
    if (reduces) {
      add_output(plan_.reduced(rank_), in_place);
      return;
    }
    for (int peer = 0; peer < plan_.n_ranks; ++peer) {
      const bool receives = plan_.sent(peer, rank_) > 0;
      add_output(receives ? plan_.data(peer, rank_) : Bytes(),
                 peer == rank_ && receives ? in_place : nullptr);
    }
  }

  // Adds an output that is expected to become `expected`; it lies in `memory` if given.
  void add_output(Bytes expected, Bytes* memory) {
    if (memory == nullptr) {
      outputs_.emplace_back(expected.size(), std::byte{0xa5});
      memory = &outputs_.back();
    } else {
      outputs_.emplace_back();
    }
    request.outputs.push_back({expected.empty() ? nullptr : memory->data(), expected.size()});
    before_.push_back(*memory);
    expected_.push_back(std::move(expected));
  }

  static ConstSpan view(const Bytes& bytes) { return {bytes.data(), bytes.size()}; }

  const Plan plan_;
  const int rank_;
  std::vector<Bytes> inputs_;
  std::vector<Bytes> outputs_;
  std::vector<Bytes> before_;    // by output
  std::vector<Bytes> expected_;  // by output
};

}  // namespace horon::testing
