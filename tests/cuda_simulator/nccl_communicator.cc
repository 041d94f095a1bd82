#include "nccl_communicator.h"

#include <algorithm>

#include "settings.h"

namespace horon::simulator {

ncclResult_t Communicator::connect(const std::string& id, int rank, int n_ranks) {
  id_ = id;
  const std::string error = mesh_.connect(id, rank, n_ranks);
  return error.empty() ? ncclSuccess : fail(ncclSystemError, "connecting the ranks: " + error);
}

void Communicator::launch(std::vector<Operation> operations) {
  Stream* const main = operations.front().stream;
  std::vector<Mark> before;
  std::vector<Stream*> others;
  for (const Operation& operation : operations) {
    Stream* stream = operation.stream;
    if (stream != main && std::find(others.begin(), others.end(), stream) == others.end()) {
      others.push_back(stream);
      before.push_back(submit(stream, [] {}));
    }
  }
  const std::lock_guard lock(mutex_);
  before.push_back(last_launch_);
  last_launch_ = submit(main, [self = shared_from_this(), before = std::move(before),
                               operations = std::move(operations)] {
    for (const Mark& mark : before) {
      mark.wait();
    }
    self->run(operations);
  });
  for (Stream* stream : others) {
    submit(stream, [mark = last_launch_] { mark.wait(); });
  }
}

void Communicator::run(const std::vector<Operation>& operations) {
  {
    const std::lock_guard lock(mutex_);
    if (is_aborted()) {
      return;
    }
    is_running_ = true;
  }
  const std::string error = run_operations(mesh_, operations);
  if (!error.empty()) {
    fail(ncclInvalidUsage, error);
    mesh_.wait_for_abort();  // real kernels would wait for each other
  }
  const std::lock_guard lock(mutex_);
  is_running_ = false;
  ended_.notify_all();
}

void Communicator::flush() {
  Mark mark;
  {
    const std::lock_guard lock(mutex_);
    mark = last_launch_;
  }
  mark.wait();
}

void Communicator::close() {
  mesh_.say_goodbye();
  mesh_.abort();
}

void Communicator::abort() {
  std::unique_lock lock(mutex_);
  mesh_.abort();
  ended_.wait(lock, [this] { return !is_running_; });
  const std::shared_ptr<Communicator> child = child_.lock();
  lock.unlock();
  if (child != nullptr) {
    child->abort();
  }
}

ncclResult_t Communicator::state() {
  std::unique_lock lock(mutex_);
  if (error_ != ncclSuccess) {
    return error_;
  }
  // NCCL looks at its connections while they are in use.
  if (settings().reports_remote_errors && is_running_ && mesh_.has_lost_peer()) {
    lock.unlock();
    return fail(ncclRemoteError, "a remote process exited or closed its communicator");
  }
  return is_in_progress_ ? ncclInProgress : ncclSuccess;
}

void Communicator::set_in_progress(bool in_progress) {
  const std::lock_guard lock(mutex_);
  is_in_progress_ = in_progress;
}

ncclResult_t Communicator::fail(ncclResult_t error, const std::string& text) {
  set_last_nccl_error(text);
  const std::lock_guard lock(mutex_);
  if (error_ == ncclSuccess) {
    error_ = error;
  }
  return error_;
}

std::vector<std::vector<int>> Communicator::exchange(const std::vector<int>& ours) {
  const auto* data = reinterpret_cast<const std::byte*>(ours.data());
  for (int peer = 0; peer < n_ranks(); ++peer) {
    mesh_.send(peer, MessageKind::kControl, {}, data, ours.size() * sizeof(int));
  }
  std::vector<std::vector<int>> all;
  for (int peer = 0; peer < n_ranks(); ++peer) {
    const std::optional<Message> message = mesh_.receive(peer, MessageKind::kControl);
    if (!message) {
      return {};
    }
    const auto* begin = reinterpret_cast<const int*>(message->payload.data());
    all.emplace_back(begin, begin + message->payload.size() / sizeof(int));
  }
  return all;
}

int Communicator::next_child() {
  const std::lock_guard lock(mutex_);
  return n_children_++;
}

void Communicator::set_child(const std::shared_ptr<Communicator>& child) {
  const std::lock_guard lock(mutex_);
  child_ = child;
}

ncclRedOp_t Communicator::add_operator(Scalar scalar) {
  const std::lock_guard lock(mutex_);
  operators_[next_operator_] = std::move(scalar);
  return static_cast<ncclRedOp_t>(next_operator_++);
}

bool Communicator::remove_operator(ncclRedOp_t op) {
  const std::lock_guard lock(mutex_);
  return operators_.erase(op) > 0;
}

bool Communicator::resolve_operator(Operation& operation) {
  if (operation.op < ncclNumOps) {
    return operation.op >= 0;
  }
  const std::lock_guard lock(mutex_);
  const auto found = operators_.find(operation.op);
  if (found == operators_.end()) {
    return false;
  }
  operation.op = ncclSum;
  operation.device_scalar = found->second.on_device;
  operation.host_scalar = found->second.on_host;
  return true;
}

}  // namespace horon::simulator
