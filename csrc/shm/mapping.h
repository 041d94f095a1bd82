// Memory shared by the ranks of a group on one host: an anonymous file and a view of it.
#pragma once

#include <cstddef>

#include "core/unique_fd.h"

namespace horon {

// A shared mapping of a whole file, or memory like it. Move-only; unmaps when destroyed.
class Mapping {
 public:
  // kLater: mapped without asking whether the system has that much; the file is sparse.
  enum class Pages { kNow, kLater };

  Mapping() = default;
  // Maps `bytes` of `fd`. Throws Error.
  Mapping(int fd, std::size_t bytes, Pages pages = Pages::kNow);
  // As much memory of this process alone. Throws Error.
  static Mapping own_memory(std::size_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // Forgets the mapping without unmapping it.
  void release() {
    data_ = nullptr;
    bytes_ = 0;
  }

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Makes an anonymous file of that size: a memfd, sealed against resizing, or (where memfd_create is
// forbidden, logged once) an unlinked file in /dev/shm. Its first `reserve_bytes` are backed by
// pages at once; in /dev/shm, which may be small, all bytes are. Refuses with an Error when that
// does not fit into the cgroup's limit or the available memory: going on would end in a SIGKILL or
// SIGBUS later.
UniqueFd create_shared_file(std::size_t bytes, std::size_t reserve_bytes);

// Throws Error unless `fd` is exactly `bytes` long and, if it is a memfd, sealed against shrinking.
void check_shared_file(int fd, std::size_t bytes);

}  // namespace horon
