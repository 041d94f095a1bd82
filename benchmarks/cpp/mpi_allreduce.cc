// The same loop over MPI_Allreduce, for comparison.
//
//   mpirun --oversubscribe -np 4 mpi_allreduce --sizes 4,65536,16777216
#include <mpi.h>

#include <iostream>

#include "loop.h"

namespace horon::benchmark {
namespace {

class MpiRank final : public Participant {
 public:
  MpiRank() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &n_ranks_);
  }

  int rank() const override { return rank_; }
  int n_ranks() const override { return n_ranks_; }

  void all_reduce(float* data, std::size_t count) override {
    MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }

  std::vector<float> gather(const std::vector<float>& samples) override {
    const auto count = static_cast<int>(samples.size());
    std::vector<float> everyones(rank_ == 0 ? samples.size() * static_cast<std::size_t>(n_ranks_)
                                            : 0);
    MPI_Gather(samples.data(), count, MPI_FLOAT, everyones.data(), count, MPI_FLOAT, 0,
               MPI_COMM_WORLD);
    return everyones;
  }

 private:
  int rank_ = 0;
  int n_ranks_ = 0;
};

}  // namespace
}  // namespace horon::benchmark

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    horon::benchmark::MpiRank participant;
    horon::benchmark::Loop(horon::benchmark::parse_settings(argc, argv), participant).run();
  } catch (const std::exception& error) {
    std::cerr << "mpi_allreduce: " << error.what() << std::endl;
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
