// One named operation of this rank, from its submission until somebody has taken its result.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "core/request.h"
#include "named/named_request.h"
#include "named/part_maker.h"

namespace horon {

// Ownership: views of tensors, which whoever made the operation keeps alive with it.
struct NamedOperation {
  virtual ~NamedOperation() = default;

  struct Tensor {
    ConstSpan input;
    Span output;  // empty where the size of the result is not known yet
  };

  // Gives the output of tensor `index` memory for `rows` rows (allgather, alltoall). Called on
  // whatever thread executes, once for each tensor. May throw.
  virtual Span allocate(std::size_t /*index*/, std::int64_t /*rows*/) { return {}; }

  // Of an operation on a device that is done, which means that it is queued there: whether it has
  // come. Any thread; does not block.
  virtual bool has_come() const { return true; }

  RequestPtr request;
  InlineVector<Tensor, 1> tensors;     // as in request->tensors
  InlineVector<std::int64_t, 1> rows;  // first dimension of each input
  std::vector<std::int64_t> splits;    // alltoall: rows for each rank of the set

  // Of one tensor that is yet to be made; null if it is there. See Note [Made in parts].
  std::shared_ptr<PartMaker> maker;
  // When the making of the tensor began, if that is to be compared: see Note [Trials].
  std::optional<std::chrono::steady_clock::time_point> began;

  // The results. Written by the engine's attendant; valid once the operation is done.
  std::vector<std::int64_t> received_splits;  // alltoall
  int value = 0;                              // join: the last rank; process sets: their number
  std::exception_ptr error;

  // The engine's.
  std::vector<NamedKey> own_keys;  // set when it is submitted, unless the request has them
  const std::vector<NamedKey>& keys() const { return own_keys.empty() ? request->keys : own_keys; }
  std::uint64_t handle = 0;
  std::size_t unfinished_tensors = 0;
  bool is_promised = false;  // its submitter will wait for it; set when it is submitted
  bool is_finished = false;  // the attendant's
  bool is_done = false;      // guarded by the engine's mutex
  bool is_left = false;      // the same; to others, who have to do their parts yet
};

}  // namespace horon
