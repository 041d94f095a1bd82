#include "nccl_group.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <set>
#include <utility>

#include "quiet_thread.h"
#include "settings.h"

namespace horon::simulator {
namespace {

// How long a job takes at least before it does anything, at random.
constexpr std::uint64_t kMaxJobDelayUs = 500;

// What one group does to one communicator.
struct Part {
  ncclComm_t comm;  // may be gone when a job is carried out
  std::shared_ptr<Communicator> communicator;
  std::vector<Operation> operations;
  std::vector<std::function<ncclResult_t()>> steps;
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Part> parts;  // in the order of first calls

  Part& part_of(ncclComm_t comm) {
    for (Part& part : parts) {
      if (part.comm == comm) {
        return part;
      }
    }
    return parts.emplace_back(Part{comm, comm->communicator, {}, {}});
  }
};

thread_local Group group;

struct Handles {
  std::mutex mutex;
  std::set<ncclComm_t> alive;               // guarded by mutex
  std::mt19937_64 random{settings().seed};  // guarded by mutex

  static Handles& get() {
    static auto* const all = new Handles;  // never freed: used until the process is gone
    return *all;
  }
  std::uint64_t draw(std::uint64_t below) {
    const std::lock_guard lock(mutex);
    return std::uniform_int_distribution<std::uint64_t>(0, below - 1)(random);
  }
};

// Blocks while communicators are made; launching never blocks.
ncclResult_t carry_out(const std::vector<Part>& parts) {
  std::vector<std::thread> threads;
  std::vector<ncclResult_t> results(parts.size(), ncclSuccess);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].steps.empty()) {
      threads.push_back(quiet_thread([&part = parts[i], &result = results[i]] {
        for (const auto& step : part.steps) {
          result = result == ncclSuccess ? step() : result;
        }
      }));
    }
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const Part& part : parts) {
    if (!part.operations.empty()) {
      part.communicator->launch(part.operations);
    }
  }
  const auto failed = std::find_if(results.begin(), results.end(),
                                   [](ncclResult_t result) { return result != ncclSuccess; });
  return failed == results.end() ? ncclSuccess : *failed;
}

// The same in a thread, some time later. Communicators stay alive, whatever becomes of their
// handles.
ncclResult_t start_job(std::vector<Part> parts) {
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (const Part& part : parts) {
    communicators.push_back(part.comm->communicator);
    communicators.back()->set_in_progress(true);
  }
  const ncclComm_t owner = parts.front().comm;
  const std::uint64_t delay_us =
      Handles::get().draw(std::max(kMaxJobDelayUs, settings().max_delay_us) + 1);
  const std::lock_guard lock(owner->job_mutex);
  if (owner->job.joinable()) {
    owner->job.join();
  }
  owner->job = quiet_thread([parts = std::move(parts), delay_us] {
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    carry_out(parts);
    for (const Part& part : parts) {
      part.communicator->set_in_progress(false);
    }
  });
  return ncclInProgress;
}

}  // namespace

ncclComm_t make_handle(std::shared_ptr<Communicator> communicator) {
  auto* comm = new ncclComm{std::move(communicator), {}, {}};
  Handles& handles = Handles::get();
  const std::lock_guard lock(handles.mutex);
  handles.alive.insert(comm);
  return comm;
}

bool is_handle(ncclComm_t comm) {
  Handles& handles = Handles::get();
  const std::lock_guard lock(handles.mutex);
  return handles.alive.contains(comm);
}

void forget_handle(ncclComm_t comm) {
  {
    Handles& handles = Handles::get();
    const std::lock_guard lock(handles.mutex);
    handles.alive.erase(comm);
  }
  if (comm->job.joinable()) {
    comm->job.join();
  }
  delete comm;
}

ncclResult_t check_ready(ncclComm_t comm) {
  if (!is_handle(comm)) {
    return fail_group(ncclInvalidArgument, "the communicator is NULL or was destroyed");
  }
  const ncclResult_t state = comm->communicator->state();
  if (state == ncclInProgress) {
    return fail_group(ncclInvalidArgument,
                      "Attempt to use communicator before the previous operation returned "
                      "ncclSuccess");
  }
  return state == ncclSuccess ? ncclSuccess : fail_group(state, "the communicator has failed");
}

void begin_group() { ++group.depth; }

ncclResult_t end_group() {
  if (group.depth == 0) {
    set_last_nccl_error("ncclGroupEnd: not in a group call");
    return ncclInvalidUsage;
  }
  if (--group.depth > 0) {
    return ncclSuccess;
  }
  const Group ended = std::exchange(group, {});
  if (ended.error != ncclSuccess) {
    return ended.error;
  }
  if (ended.parts.empty()) {
    return ncclSuccess;
  }
  const bool has_steps = std::any_of(ended.parts.begin(), ended.parts.end(),
                                     [](const Part& part) { return !part.steps.empty(); });
  const bool is_blocking =
      std::all_of(ended.parts.begin(), ended.parts.end(),
                  [](const Part& part) { return part.communicator->is_blocking(); });
  if (is_blocking || (!has_steps && Handles::get().draw(4) == 0)) {
    return carry_out(ended.parts);
  }
  return start_job(ended.parts);
}

void add_operation(ncclComm_t comm, Operation operation) {
  group.part_of(comm).operations.push_back(std::move(operation));
}

void add_step(ncclComm_t comm, std::function<ncclResult_t()> step) {
  group.part_of(comm).steps.push_back(std::move(step));
}

ncclResult_t fail_group(ncclResult_t error, const std::string& text) {
  set_last_nccl_error(text);
  if (group.depth > 0 && group.error == ncclSuccess) {
    group.error = error;
  }
  return error;
}

}  // namespace horon::simulator
