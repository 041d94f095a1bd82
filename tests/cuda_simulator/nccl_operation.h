// What one rank has to do for the calls of a group on one communicator.
#pragma once

#include <string>
#include <vector>

#include "nccl_header.h"
#include "nccl_mesh.h"
#include "streams.h"

namespace horon::simulator {

enum class Function : std::int32_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kRecv,
};

// One call. Its buffers are read and written when the stream gets there.
struct Operation {
  Function function;
  const std::byte* send;
  std::byte* recv;
  std::size_t count;
  ncclDataType_t dtype;
  ncclRedOp_t op = ncclSum;
  int root = 0;  // of a send or receive: the peer
  Stream* stream = nullptr;
  // Of an operator by ncclRedOpCreatePreMulSum: where its scalar is, or what it is.
  const std::byte* device_scalar = nullptr;
  Bytes host_scalar;

  std::size_t bytes() const;
  bool is_point_to_point() const {
    return function == Function::kSend || function == Function::kRecv;
  }
};

// Carries out the calls of one group: blocks until all peers have come, or the mesh is aborted.
// Returns
// "" or how the calls of the ranks differ.
std::string run_operations(Mesh& mesh, const std::vector<Operation>& operations);

}  // namespace horon::simulator
