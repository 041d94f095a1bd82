// The loop that every all-reduce benchmark without PyTorch runs, whatever carries the bytes.
//
// Like benchmarks/collectives.py: inputs are rewritten before each batch, large tensors rotate
// through more memory than the caches hold, a few tiny calls before each batch take up the ranks'
// skew, and a duration is the time between two stamps on one rank. Knows neither horon nor MPI.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace horon::benchmark {

struct Settings {
  int n_ranks = 2;
  std::vector<std::size_t> sizes_bytes = {4, 1024, 4096, 65536, 1048576, 16777216, 67108864};
  double seconds = 0.3;                           // for one size
  std::size_t pool_bytes = std::size_t{1} << 26;  // what large tensors rotate through
};

inline constexpr std::size_t kLargeBytes = std::size_t{1} << 20;
inline constexpr std::size_t kSmallPool = 8;
inline constexpr int kLeadInCalls = 5;
inline constexpr std::size_t kMostCallsInBatch = 1000;
inline constexpr std::size_t kMostSamples = 50000;  // of one rank at one size

// Reads "--ranks N --sizes a,b --seconds s --pool-bytes p". Throws std::invalid_argument.
inline Settings parse_settings(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    const std::string value = argv[i + 1];
    if (option == "--ranks") {
      settings.n_ranks = std::stoi(value);
    } else if (option == "--seconds") {
      settings.seconds = std::stod(value);
    } else if (option == "--pool-bytes") {
      settings.pool_bytes = std::stoul(value);
    } else if (option == "--sizes") {
      settings.sizes_bytes.clear();
      for (std::size_t at = 0; at < value.size();) {
        const std::size_t comma = std::min(value.find(',', at), value.size());
        settings.sizes_bytes.push_back(std::stoul(value.substr(at, comma - at)));
        at = comma + 1;
      }
    } else {
      throw std::invalid_argument("unknown option " + option +
                                  "; known: --ranks, --sizes, --seconds, --pool-bytes");
    }
  }
  return settings;
}

// Floats that begin where a cache line does, as torch's tensors do; std::vector's large ones do
// not, and unaligned vectors would be measured.
class Tensor {
 public:
  explicit Tensor(std::size_t count)
      : data_(static_cast<float*>(std::aligned_alloc(kAlignment, rounded_bytes(count)))),
        count_(count) {
    if (!data_) {
      throw std::bad_alloc();
    }
    fill(0);  // so that its pages exist
  }

  float* data() { return data_.get(); }
  std::size_t size() const { return count_; }
  float& operator[](std::size_t i) { return data_.get()[i]; }
  void fill(float value) { std::fill(data_.get(), data_.get() + count_, value); }

 private:
  static constexpr std::size_t kAlignment = 64;
  static std::size_t rounded_bytes(std::size_t count) {
    return (count * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
  }
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };

  std::unique_ptr<float, Free> data_;
  std::size_t count_;
};

// How a rank takes part.
class Participant {
 public:
  virtual ~Participant() = default;
  virtual int rank() const = 0;
  virtual int n_ranks() const = 0;
  // Sums in place over all ranks.
  virtual void all_reduce(float* data, std::size_t count) = 0;
  // Returns the samples of all ranks on rank 0, and nothing elsewhere. Each brings equally many.
  virtual std::vector<float> gather(const std::vector<float>& samples) = 0;
};

// Reports to standard output, one line of JSON for each size. Throws std::runtime_error if a sum is
// wrong.
class Loop {
 public:
  Loop(Settings settings, Participant& participant)
      : settings_(std::move(settings)), participant_(participant) {}

  void run() {
    for (const std::size_t size_bytes : settings_.sizes_bytes) {
      measure(size_bytes);
    }
  }

 private:
  using Stamp = std::chrono::steady_clock::time_point;

  void measure(std::size_t size_bytes) {
    const std::size_t count = std::max<std::size_t>(1, size_bytes / sizeof(float));
    const bool is_large = size_bytes >= kLargeBytes;
    const std::size_t pool_size =
        is_large ? std::max<std::size_t>(2, settings_.pool_bytes / size_bytes + 1) : kSmallPool;
    std::vector<Tensor> pool;
    for (std::size_t i = 0; i < pool_size; ++i) {
      pool.emplace_back(count);
    }
    check(pool[0]);

    // All ranks decide alike, because all get the same sum.
    std::vector<float> trial = batch(pool, 8);
    float seconds_for_call = *std::min_element(trial.begin(), trial.end()) / 1e6f;
    participant_.all_reduce(&seconds_for_call, 1);
    const double call = std::max(1e-7, double{seconds_for_call} / participant_.n_ranks());
    const auto fits = static_cast<std::size_t>(0.02 / call);
    const std::size_t calls =
        is_large ? pool_size : std::clamp(fits, std::size_t{8}, kMostCallsInBatch);
    const auto wanted =
        static_cast<std::size_t>(settings_.seconds / (call * static_cast<double>(calls)));
    const std::size_t batches = std::clamp(wanted, std::size_t{2}, kMostSamples / calls);

    std::vector<float> samples;
    samples.reserve(batches * calls);
    for (std::size_t i = 0; i < batches; ++i) {
      const std::vector<float> one = batch(pool, calls);
      samples.insert(samples.end(), one.begin(), one.end());
    }
    report(size_bytes, participant_.gather(samples));
  }

  // Returns each call's microseconds.
  std::vector<float> batch(std::vector<Tensor>& pool, std::size_t calls) {
    for (std::size_t i = 0; i < pool.size(); ++i) {
      pool[i].fill(static_cast<float>(participant_.rank()) + static_cast<float>(i));
    }
    for (int i = 0; i < kLeadInCalls; ++i) {
      float tiny = 0;
      participant_.all_reduce(&tiny, 1);
    }
    stamps_.resize(calls + 1);
    stamps_[0] = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < calls; ++i) {
      Tensor& tensor = pool[i % pool.size()];
      participant_.all_reduce(tensor.data(), tensor.size());
      stamps_[i + 1] = std::chrono::steady_clock::now();
    }
    std::vector<float> result(calls);
    for (std::size_t i = 0; i < calls; ++i) {
      result[i] = std::chrono::duration<float, std::micro>(stamps_[i + 1] - stamps_[i]).count();
    }
    return result;
  }

  void check(Tensor& tensor) {
    const int n = participant_.n_ranks();
    for (std::size_t i = 0; i < tensor.size(); ++i) {
      tensor[i] = static_cast<float>(i % 1021) + static_cast<float>(participant_.rank());
    }
    participant_.all_reduce(tensor.data(), tensor.size());
    for (std::size_t i = 0; i < tensor.size(); ++i) {
      const auto expected = static_cast<float>(i % 1021 * n + n * (n - 1) / 2);
      if (tensor[i] != expected) {
        throw std::runtime_error("all_reduce of " + std::to_string(tensor.size()) +
                                 " float32: element " + std::to_string(i) + " is " +
                                 std::to_string(tensor[i]) + ", expected " +
                                 std::to_string(expected));
      }
    }
  }

  static void report(std::size_t size_bytes, std::vector<float> samples) {
    if (samples.empty()) {
      return;
    }
    std::sort(samples.begin(), samples.end());
    const auto at = [&](double fraction) {
      return samples[static_cast<std::size_t>(fraction * static_cast<double>(samples.size() - 1))];
    };
    std::printf(
        "{\"bytes\": %zu, \"median_us\": %.4f, \"p99_us\": %.4f, \"min_us\": %.4f, \"samples\": "
        "%zu}\n",
        size_bytes, double{at(0.5)}, double{at(0.99)}, double{at(0)}, samples.size());
    std::fflush(stdout);
  }

  const Settings settings_;
  Participant& participant_;
  std::vector<Stamp> stamps_;
};

}  // namespace horon::benchmark
