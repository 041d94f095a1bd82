// A trace of named operations, for chrome://tracing and Perfetto.
#pragma once

#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "core/deadline.h"
#include "named/named_request.h"

namespace horon {

// One row per tensor, as in Horovod: NEGOTIATE_<operation>, then the operation. The file has every
// event as soon as it happened: it is looked at while a job hangs, and after one was killed.
//
// Thread safety: all methods. While it is off, a call costs one load.
class Timeline {
 public:
  ~Timeline();

  // A trace that is running ends first. Throws UsageError when the file can not be written.
  void start(const std::string& path, int rank, bool mark_cycles);
  void stop();
  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }

  void announced(const NamedRequest& request);
  void agreed(const NamedRequest& request);
  void begin(const NamedRequest& request, std::size_t tensor);
  void end(const NamedRequest& request, std::size_t tensor);
  // A batch was agreed on: what Horovod calls a cycle.
  void mark_cycle();

 private:
  struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  // Requires the lock.
  void write(const char* phase, const std::string& tensor, const std::string& name);
  int row_of(const std::string& tensor);
  // Brings what was written into the file. Requires the lock.
  void flush();
  // Ends the file. Requires the lock, and a file.
  void finish();

  std::atomic<bool> is_on_{false};  // changed under mutex_; relaxed: a late event may be missed
  std::mutex mutex_;
  // Guarded by mutex_:
  std::unique_ptr<std::FILE, CloseFile> file_;
  std::unordered_map<std::string, int> rows_;
  Clock::time_point started_;
  int rank_ = 0;
  bool mark_cycles_ = false;
  bool is_first_ = true;
};

}  // namespace horon
