// The reduce ops of a plan, those of PREMUL_SUM made by NCCL for the plan's factors.
#pragma once

#include <vector>

#include "nccl/communicator.h"
#include "nccl/nccl_plan.h"

namespace horon {

// Made before the group begins, and destroyed after it has ended: NCCL allows that as soon as the
// calls have returned.
// Ownership: the api and the use must outlive it.
class PremulOps {
 public:
  PremulOps(NcclApi& api, const Communicator::Use& use) : api_(api), use_(use) {}
  ~PremulOps();
  PremulOps(const PremulOps&) = delete;
  PremulOps& operator=(const PremulOps&) = delete;

  // The op for the reduction; the same one for equal dtypes and factors. Throws as Use::check.
  NcclReduceOp op_for(const NcclReduction& reduction);

 private:
  struct Made {
    NcclDataType dtype;
    double factor;
    NcclReduceOp op;
  };

  NcclApi& api_;
  const Communicator::Use& use_;
  std::vector<Made> made_;  // few
};

}  // namespace horon
