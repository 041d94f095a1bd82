// Groups of calls, and the jobs that carry them out.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "nccl_communicator.h"

// The type that ncclComm_t points to.
struct ncclComm {
  std::shared_ptr<horon::simulator::Communicator> communicator;
  // The newest job of the communicator; joined by the next one and when the handle goes.
  std::mutex job_mutex;
  std::thread job;
};

namespace horon::simulator {

// New handles; those that were destroyed are not found again.
ncclComm_t make_handle(std::shared_ptr<Communicator> communicator);
bool is_handle(ncclComm_t comm);
void forget_handle(ncclComm_t comm);

// ncclSuccess where the communicator may be used now.
ncclResult_t check_ready(ncclComm_t comm);

void begin_group();
// Ends the group; the outermost one carries out what was added.
ncclResult_t end_group();
// Require a group.
void add_operation(ncclComm_t comm, Operation operation);
// A step that may block, such as making a communicator: in a thread of its own.
void add_step(ncclComm_t comm, std::function<ncclResult_t()> step);
// The whole group is dropped; its end returns the error.
ncclResult_t fail_group(ncclResult_t error, const std::string& text);

}  // namespace horon::simulator
