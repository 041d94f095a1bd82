// A communicator of NCCL.
//
// Note [Non-blocking communicators]
// Where config.blocking is 0, making a communicator and starting operations are jobs of a thread of
// their own: the call returns ncclInProgress, and until ncclCommGetAsyncError says ncclSuccess
// nothing was put on any stream, and no other call may use the communicator. A caller that does not
// ask finds its event recorded before the operation, as it would with NCCL. Now and then operations
// are started at once, as NCCL is free to do.
//
// Thread safety: as NCCL's: one thread at a time, but abort() and state() at any time.
// Ownership: shared by the handle, the entries on streams and the jobs.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl_header.h"
#include "nccl_mesh.h"
#include "nccl_operation.h"
#include "streams.h"

namespace horon::simulator {

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(int device, bool is_blocking) : device_(device), is_blocking_(is_blocking) {}

  const std::string& id() const { return id_; }
  int rank() const { return mesh_.rank(); }
  int n_ranks() const { return mesh_.n_ranks(); }
  int device() const { return device_; }
  bool is_blocking() const { return is_blocking_; }

  // Blocks until all ranks are there. Called once, before all else but abort() and state().
  ncclResult_t connect(const std::string& id, int rank, int n_ranks);
  // Puts the calls of one group on their streams: one entry, which the other streams wait for.
  void launch(std::vector<Operation> operations);
  // Blocks until what was launched is done.
  void flush();
  // Takes leave of the peers; requires that flush() was called.
  void close();
  // Ends what is under way, blocks until it has ended, and ends at once what comes later.
  void abort();
  bool is_aborted() const { return mesh_.is_aborted(); }

  // ncclSuccess, ncclInProgress, or the first error.
  ncclResult_t state();
  void set_in_progress(bool in_progress);
  ncclResult_t fail(ncclResult_t error, const std::string& text);

  // One exchange of a few numbers with all ranks, on the calling thread; empty when aborted.
  std::vector<std::vector<int>> exchange(const std::vector<int>& ours);
  // A new number for each communicator that is made from this one, equal on all ranks.
  int next_child();
  // A child that is being made: ends with this one.
  void set_child(const std::shared_ptr<Communicator>& child);

  // Operators by ncclRedOpCreatePreMulSum.
  struct Scalar {
    const std::byte* on_device;
    Bytes on_host;
  };
  ncclRedOp_t add_operator(Scalar scalar);
  bool remove_operator(ncclRedOp_t op);
  // Replaces such an operator by its scalar and ncclSum; false for one that does not exist.
  bool resolve_operator(Operation& operation);

 private:
  void run(const std::vector<Operation>& operations);

  std::string id_;  // constant after connect()
  const int device_;
  const bool is_blocking_;
  Mesh mesh_;

  std::mutex mutex_;
  std::condition_variable ended_;
  // Guarded by mutex_.
  bool is_running_ = false;  // a stream is carrying out operations
  ncclResult_t error_ = ncclSuccess;
  bool is_in_progress_ = false;
  Mark last_launch_;  // operations of a communicator run in the order of their launches
  std::map<int, Scalar> operators_;
  int next_operator_ = ncclNumOps;
  int n_children_ = 0;
  std::weak_ptr<Communicator> child_;
};

// NCCL's last error, for ncclGetLastError.
void set_last_nccl_error(const std::string& text);

}  // namespace horon::simulator
