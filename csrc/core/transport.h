// How collectives of one group travel. Two exist: shared memory within a host, and bytes carried by
// somebody else's process group between hosts.
#pragma once

#include <string>

#include "core/request.h"
#include "core/wait_context.h"

namespace horon {

// Thread safety: run belongs to one thread at a time (the lane sees to it); abort and depart may
// come from any thread, also while run blocks.
class Transport {
 public:
  virtual ~Transport() = default;

  // Runs one collective to its end, the arrival phase included.
  // Throws MismatchError (the ranks disagree: only this call failed, on every rank), GroupError and
  // its kinds (the group is over), or what context.check_interrupt throws (the group is over).
  virtual void run(const Request& request, const WaitContext& context) = 0;

  // Ends the group for all ranks: running and later operations fail with the reason.
  virtual void abort(const std::string& reason) = 0;

  // Says goodbye: this rank runs nothing more. Fails nothing that it has already done its part of.
  virtual void depart() = 0;
};

}  // namespace horon
