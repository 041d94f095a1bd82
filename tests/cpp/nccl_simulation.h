// Carries out the plans of all ranks of a group on host memory, as NCCL would on GPUs: proves that
// the ranks make matching calls, and that the right bytes arrive.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "nccl/nccl_plan.h"

namespace horon::testing {

// Reductions are of int32 alone, which is enough to see which elements meet.
class NcclSimulation {
 public:
  explicit NcclSimulation(std::vector<NcclPlan> plans) : plans_(std::move(plans)) {}

  // Throws where ranks would hang in NCCL, or would get an error from it.
  void run() {
    for (const NcclPlan& plan : plans_) {
      copy(plan.before);
    }
    std::vector<std::vector<NcclCall>> collectives;
    for (std::size_t rank = 0; rank < plans_.size(); ++rank) {
      collectives.emplace_back();
      for (const NcclCall& call : plans_[rank].calls) {
        if (call.function == NcclFunction::kSend) {
          messages_[{static_cast<int>(rank), call.peer}].push_back(bytes_of(call.send, call.count));
        } else if (call.function != NcclFunction::kRecv) {
          collectives.back().push_back(call);
        }
      }
    }
    for (std::size_t i = 0; i < collectives[0].size(); ++i) {
      std::vector<NcclCall> calls;
      for (const auto& of_rank : collectives) {
        HORON_CHECK(i < of_rank.size(), "a rank makes fewer collective calls than rank 0");
        calls.push_back(of_rank[i]);
      }
      collective(calls);
    }
    for (const auto& of_rank : collectives) {
      HORON_CHECK(of_rank.size() == collectives[0].size(), "a rank makes more calls than rank 0");
    }
    receive();
    for (const NcclPlan& plan : plans_) {
      copy(plan.after);
    }
  }

 private:
  using Bytes = std::vector<std::byte>;

  static Bytes bytes_of(const void* data, std::size_t bytes) {
    const auto* begin = static_cast<const std::byte*>(data);
    return {begin, begin + bytes};
  }

  static void copy(const std::vector<ByteCopy>& copies) {
    for (const ByteCopy& each : copies) {
      std::memcpy(reinterpret_cast<void*>(each.destination),
                  reinterpret_cast<const void*>(each.source), each.bytes);
    }
  }

  void receive() {
    for (std::size_t rank = 0; rank < plans_.size(); ++rank) {
      for (const NcclCall& call : plans_[rank].calls) {
        if (call.function == NcclFunction::kRecv) {
          auto& queue = messages_[{call.peer, static_cast<int>(rank)}];
          HORON_CHECK(!queue.empty(), "rank ", rank, " waits for rank ", call.peer, " for ever");
          HORON_CHECK(queue.front().size() == call.count, "a message of another size");
          std::memcpy(call.recv, queue.front().data(), call.count);
          queue.pop_front();
        }
      }
    }
    for (const auto& [pair, queue] : messages_) {
      HORON_CHECK(queue.empty(), "rank ", pair.first, " sends to rank ", pair.second, " for ever");
    }
  }

  // The sum over the ranks of `count` elements from `offset` on. Unsigned, which has the same bits:
  // what lies in the gaps of a buffer is added, too, and may be anything.
  static Bytes sum(const std::vector<NcclCall>& calls, std::size_t offset, std::size_t count) {
    std::vector<std::uint32_t> total(count, 0);
    for (const NcclCall& call : calls) {
      for (std::size_t i = 0; i < count; ++i) {
        total[i] += static_cast<const std::uint32_t*>(call.send)[offset + i];
      }
    }
    return bytes_of(total.data(), count * sizeof(std::uint32_t));
  }

  static void store(void* target, const Bytes& bytes) {
    std::memcpy(target, bytes.data(), bytes.size());
  }

  void collective(const std::vector<NcclCall>& calls) {
    const NcclCall& first = calls[0];
    const std::size_t count = first.count;
    const auto root = static_cast<std::size_t>(first.peer);
    for (const NcclCall& call : calls) {
      HORON_CHECK(call.function == first.function && call.count == count &&
                      call.reduction.dtype == first.reduction.dtype &&
                      call.reduction.op == first.reduction.op && call.peer == first.peer,
                  "ranks make different calls: ", name(first.function), ' ', count, " and ",
                  name(call.function), ' ', call.count);
    }
    const std::size_t bytes = count * element_bytes(first.reduction.dtype);
    Bytes result;
    switch (first.function) {
      case NcclFunction::kAllReduce:
        result = sum(calls, 0, count);
        break;
      case NcclFunction::kReduce:
        store(calls[root].recv, sum(calls, 0, count));
        return;
      case NcclFunction::kBroadcast:
        result = bytes_of(calls[root].send, bytes);
        break;
      case NcclFunction::kAllGather:
        for (const NcclCall& call : calls) {
          const Bytes part = bytes_of(call.send, bytes);
          result.insert(result.end(), part.begin(), part.end());
        }
        break;
      case NcclFunction::kReduceScatter: {
        std::vector<Bytes> parts;
        for (std::size_t rank = 0; rank < calls.size(); ++rank) {
          parts.push_back(sum(calls, rank * count, count));
        }
        for (std::size_t rank = 0; rank < calls.size(); ++rank) {
          store(calls[rank].recv, parts[rank]);
        }
        return;
      }
      default:
        HORON_CHECK(false, "not a collective: ", name(first.function));
    }
    for (const NcclCall& call : calls) {
      store(call.recv, result);
    }
  }

  std::vector<NcclPlan> plans_;
  std::map<std::pair<int, int>, std::deque<Bytes>> messages_;
};

}  // namespace horon::testing
