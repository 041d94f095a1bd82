// Memory shared by the ranks of a group on one host: an anonymous file and a view of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shm/unique_fd.h"

namespace horon {

// A shared mapping of a whole file. Move-only; unmaps when destroyed.
class Mapping {
 public:
  Mapping() = default;
  // Maps `bytes` of `fd`. Throws Error.
  Mapping(int fd, std::size_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Makes an anonymous file of that size: a memfd, sealed against resizing, or (where memfd_create is
// forbidden, logged once) an unlinked file in /dev/shm. Its first `reserve_bytes` are backed by
// pages at once. Refuses with an Error when that does not fit into the cgroup's limit or the
// available memory: going on would end in a SIGKILL or SIGBUS later.
UniqueFd create_shared_file(std::size_t bytes, std::size_t reserve_bytes);

// Throws Error unless `fd` is exactly `bytes` long and can not shrink.
void check_shared_file(int fd, std::size_t bytes);

}  // namespace horon
