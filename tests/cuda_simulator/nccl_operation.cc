// Every collective is one exchange: a rank sends each peer what it needs of this rank, which may be
// nothing, and then computes its result from what all peers sent. So none is done before all ranks
// have come, and all see at once whether they call the same function.
//
// A send is done when the peer says that it has received. All sends of a group go out before
// anything waits, so that no order of calls within a group can block another rank's group.
#include "nccl_operation.h"

#include <cstring>
#include <optional>

#include "nccl_reduce.h"

namespace horon::simulator {
namespace {

Signature signature_of(const Operation& operation) {
  return {static_cast<std::int32_t>(operation.function), operation.dtype, operation.op,
          operation.is_point_to_point() ? 0 : operation.root, operation.count};
}

std::string text_of(const Signature& signature) {
  static const char* const kNames[] = {"AllReduce",     "Broadcast", "Reduce", "AllGather",
                                       "ReduceScatter", "AlltoAll",  "Gather", "Scatter",
                                       "Send",          "Recv"};
  const auto function = static_cast<std::size_t>(signature.function);
  return std::string(function < std::size(kNames) ? kNames[function] : "?") + "(count " +
         std::to_string(signature.count) + ", dtype " + std::to_string(signature.dtype) + ", op " +
         std::to_string(signature.op) + ", root " + std::to_string(signature.root) + ")";
}

std::string difference(int rank, const Signature& ours, int peer, const Signature& theirs) {
  return "rank " + std::to_string(rank) + " calls " + text_of(ours) + ", rank " +
         std::to_string(peer) + " calls " + text_of(theirs);
}

// The part of the send buffer that a peer needs.
struct Part {
  std::size_t offset;
  std::size_t bytes;
};

Part part_for(const Operation& operation, int rank, int peer) {
  const std::size_t bytes = operation.bytes();
  const Part slice{static_cast<std::size_t>(peer) * bytes, bytes};
  switch (operation.function) {
    case Function::kAllReduce:
    case Function::kAllGather:
      return {0, bytes};
    case Function::kReduce:
    case Function::kGather:
      return {0, peer == operation.root ? bytes : 0};
    case Function::kBroadcast:
      return {0, rank == operation.root ? bytes : 0};
    case Function::kScatter:
      return rank == operation.root ? slice : Part{0, 0};
    default:
      return slice;
  }
}

Bytes payload_for(const Operation& operation, int rank, int peer) {
  const Part part = part_for(operation, rank, peer);
  if (part.bytes == 0) {
    return {};
  }
  const std::byte* begin = operation.send + part.offset;
  Bytes payload(begin, begin + part.bytes);
  if (operation.device_scalar != nullptr) {
    multiply(payload, operation.dtype, operation.device_scalar);
  } else if (!operation.host_scalar.empty()) {
    multiply(payload, operation.dtype, operation.host_scalar.data());
  }
  return payload;
}

// `parts` has what each rank sent to this one.
void finish(const Operation& operation, int rank, const std::vector<Bytes>& parts) {
  if (operation.count == 0) {
    return;
  }
  const bool is_root = rank == operation.root;
  const auto copy_in_order = [&] {
    std::byte* at = operation.recv;
    for (const Bytes& part : parts) {
      std::memcpy(at, part.data(), part.size());
      at += operation.bytes();
    }
  };
  switch (operation.function) {
    case Function::kReduce:
      if (!is_root) {
        return;
      }
      [[fallthrough]];
    case Function::kAllReduce:
    case Function::kReduceScatter:
      reduce(parts, operation.dtype, operation.op, operation.recv);
      return;
    case Function::kBroadcast:
    case Function::kScatter: {
      const Bytes& part = parts[static_cast<std::size_t>(operation.root)];
      std::memcpy(operation.recv, part.data(), part.size());
      return;
    }
    case Function::kGather:
      if (is_root) {
        copy_in_order();
      }
      return;
    default:
      copy_in_order();
  }
}

// "" when done or aborted.
std::string run_collective(Mesh& mesh, const Operation& operation) {
  const Signature ours = signature_of(operation);
  for (int peer = 0; peer < mesh.n_ranks(); ++peer) {
    const Bytes payload = payload_for(operation, mesh.rank(), peer);
    mesh.send(peer, MessageKind::kCollective, ours, payload.data(), payload.size());
  }
  std::vector<Bytes> parts;
  for (int peer = 0; peer < mesh.n_ranks(); ++peer) {
    std::optional<Message> message = mesh.receive(peer, MessageKind::kCollective);
    if (!message) {
      return "";
    }
    if (message->signature != ours) {
      return difference(mesh.rank(), ours, peer, message->signature);
    }
    parts.push_back(std::move(message->payload));
  }
  finish(operation, mesh.rank(), parts);
  return "";
}

void start_send(Mesh& mesh, const Operation& operation) {
  mesh.send(operation.root, MessageKind::kPointToPoint, signature_of(operation), operation.send,
            operation.bytes());
}

// "" when done or aborted.
std::string run_receive(Mesh& mesh, const Operation& operation) {
  const std::optional<Message> message = mesh.receive(operation.root, MessageKind::kPointToPoint);
  if (!message) {
    return "";
  }
  if (message->payload.size() != operation.bytes()) {
    return difference(mesh.rank(), signature_of(operation), operation.root, message->signature);
  }
  if (operation.count > 0) {
    std::memcpy(operation.recv, message->payload.data(), message->payload.size());
  }
  mesh.send(operation.root, MessageKind::kReceipt, {}, nullptr, 0);
  return "";
}

}  // namespace

std::size_t Operation::bytes() const { return count * element_bytes(dtype); }

std::string run_operations(Mesh& mesh, const std::vector<Operation>& operations) {
  for (const Operation& operation : operations) {
    if (operation.function == Function::kSend) {
      start_send(mesh, operation);
    }
  }
  for (const Operation& operation : operations) {
    if (!operation.is_point_to_point()) {
      if (std::string error = run_collective(mesh, operation); !error.empty()) {
        return error;
      }
    }
  }
  for (const Operation& operation : operations) {
    if (operation.function == Function::kRecv) {
      if (std::string error = run_receive(mesh, operation); !error.empty()) {
        return error;
      }
    }
  }
  for (const Operation& operation : operations) {
    if (operation.function == Function::kSend) {
      mesh.receive(operation.root, MessageKind::kReceipt);
    }
  }
  return "";
}

}  // namespace horon::simulator
