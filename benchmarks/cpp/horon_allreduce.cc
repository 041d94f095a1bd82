// all_reduce between processes over horon's shared memory, without PyTorch.
//
//   horon_allreduce --ranks 4 --sizes 4,65536,16777216
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <iostream>

#include "core/options.h"
#include "fork_store.h"
#include "loop.h"
#include "shm/rendezvous.h"
#include "shm/shm_transport.h"

namespace horon::benchmark {
namespace {

constexpr std::chrono::seconds kTimeout{60};

// Where the ranks leave their samples for rank 0: [n_ranks][kMostSamples], made before the fork.
class SampleBoard {
 public:
  explicit SampleBoard(int n_ranks)
      : bytes_(static_cast<std::size_t>(n_ranks) * kMostSamples * sizeof(float)) {
    void* memory =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    HORON_CHECK(memory != MAP_FAILED, "mmap of ", bytes_, " bytes: ", std::strerror(errno));
    samples_ = static_cast<float*>(memory);
  }
  SampleBoard(const SampleBoard&) = delete;
  SampleBoard& operator=(const SampleBoard&) = delete;
  ~SampleBoard() { ::munmap(samples_, bytes_); }

  float* of(int rank) const { return samples_ + static_cast<std::size_t>(rank) * kMostSamples; }

 private:
  const std::size_t bytes_;
  float* samples_ = nullptr;
};

class HoronRank final : public Participant {
 public:
  HoronRank(int rank, int n_ranks, Store& store, const SampleBoard& board)
      : rank_(rank), n_ranks_(n_ranks), board_(board) {
    GroupIdentity identity;
    identity.rank = rank;
    identity.n_ranks = n_ranks;
    for (int i = 0; i < n_ranks; ++i) {
      identity.global_ranks.push_back(i);
    }
    group_ = rendezvous(store, identity, Options::from_environment(), Deadline::after(kTimeout));
    HORON_CHECK(group_ != nullptr, "the ranks share no memory");
    transport_ = std::make_unique<ShmTransport>(&group_->segment, &group_->peers);
    request_.kind = OpKind::kAllReduce;
    request_.dtype = DType::kFloat32;
    request_.op = ReduceOp::kSum;
    request_.element_bytes = sizeof(float);
    request_.inputs.resize(1);
    request_.outputs.resize(1);
  }
  HoronRank(const HoronRank&) = delete;
  HoronRank& operator=(const HoronRank&) = delete;
  ~HoronRank() override { transport_->depart(); }

  int rank() const override { return rank_; }
  int n_ranks() const override { return n_ranks_; }

  void all_reduce(float* data, std::size_t count) override {
    auto* bytes = reinterpret_cast<std::byte*>(data);
    request_.count = count;
    request_.inputs[0] = {bytes, count * sizeof(float)};
    request_.outputs[0] = {bytes, count * sizeof(float)};
    transport_->run(request_, WaitContext{Deadline::after(kTimeout), nullptr});
  }

  std::vector<float> gather(const std::vector<float>& samples) override {
    std::copy(samples.begin(), samples.end(), board_.of(rank_));
    float all_wrote = 0;
    all_reduce(&all_wrote, 1);
    std::vector<float> everyones;
    for (int rank = 0; rank_ == 0 && rank < n_ranks_; ++rank) {
      everyones.insert(everyones.end(), board_.of(rank), board_.of(rank) + samples.size());
    }
    float all_read = 0;
    all_reduce(&all_read, 1);
    return everyones;
  }

 private:
  const int rank_;
  const int n_ranks_;
  const SampleBoard& board_;
  std::unique_ptr<SharedGroup> group_;
  std::unique_ptr<ShmTransport> transport_;
  Request request_;
};

// Returns the exit code of a rank.
int run_rank(int rank, const Settings& settings, Store& store, const SampleBoard& board) {
  try {
    HoronRank participant(rank, settings.n_ranks, store, board);
    Loop(settings, participant).run();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "horon_allreduce: rank " << rank << ": " << error.what() << std::endl;
    return 1;
  }
}

int run(const Settings& settings) {
  ForkStore store;
  const SampleBoard board(settings.n_ranks);
  for (int rank = 0; rank < settings.n_ranks; ++rank) {
    const pid_t pid = ::fork();
    HORON_CHECK(pid >= 0, "fork: ", std::strerror(errno));
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      std::_Exit(run_rank(rank, settings, store, board));
    }
  }
  int status = 0;
  for (int rank = 0; rank < settings.n_ranks; ++rank) {
    int one = 0;
    HORON_CHECK(::wait(&one) > 0, "wait: ", std::strerror(errno));
    status |= one;
  }
  return status == 0 ? 0 : 1;
}

}  // namespace
}  // namespace horon::benchmark

int main(int argc, char** argv) {
  try {
    return horon::benchmark::run(horon::benchmark::parse_settings(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "horon_allreduce: " << error.what() << std::endl;
    return 2;
  }
}
