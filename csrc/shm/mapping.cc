#include "shm/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <random>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "shm/in_pieces.h"
#include "shm/memory_limit.h"

namespace horon {
namespace {

UniqueFd create_unlinked_file(int memfd_error) {
  static std::atomic<bool> logged{false};
  if (!logged.exchange(true)) {
    log_warning(concat(system_error_text("memfd_create", memfd_error),
                       "; using unlinked files in /dev/shm instead"));
  }
  std::random_device random;
  char name[64];
  std::snprintf(name, sizeof name, "/horon-%08x%08x", random(), random());
  UniqueFd fd(::shm_open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  HORON_CHECK(fd, system_error_text("shm_open", errno),
              ". horon needs memfd_create or /dev/shm for shared memory.");
  ::shm_unlink(name);
  return fd;
}

}  // namespace

Mapping::Mapping(int fd, std::size_t bytes, Pages pages) : bytes_(bytes) {
  const int flags = MAP_SHARED | (pages == Pages::kLater ? MAP_NORESERVE : 0);
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  HORON_CHECK(address != MAP_FAILED, system_error_text("mmap", errno), " (", bytes,
              " bytes of shared memory)");
  data_ = static_cast<std::byte*>(address);
}

Mapping Mapping::own_memory(std::size_t bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  HORON_CHECK(address != MAP_FAILED, system_error_text("mmap", errno), " (", bytes, " bytes)");
  Mapping mapping;
  mapping.data_ = static_cast<std::byte*>(address);
  mapping.bytes_ = bytes;
  return mapping;
}

Mapping::~Mapping() {
  if (data_ != nullptr) {
    ::munmap(data_, bytes_);
  }
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

UniqueFd create_shared_file(std::size_t bytes, std::size_t reserve_bytes) {
  UniqueFd fd(::memfd_create("horon", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const bool sealable = static_cast<bool>(fd);
  if (!sealable) {
    const int why = errno;
    // A file in /dev/shm would need a descriptor, and memory, as well.
    const bool is_forbidden = why != EMFILE && why != ENFILE && why != ENOMEM;
    HORON_CHECK(is_forbidden, system_error_text("memfd_create", why));
    // What grows on demand (the arena) would have to be reserved whole.
    HORON_CHECK(reserve_bytes > 0, system_error_text("memfd_create", why));
    fd = create_unlinked_file(why);
    // /dev/shm has a size of its own, often small: a page that it can not give later is a SIGBUS.
    reserve_bytes = bytes;
  }
  if (const auto refusal = why_memory_is_short(reserve_bytes)) {
    throw Error(concat("shared memory for a group: ", *refusal,
                       " Free some, or lower HORON_BUFFER_BYTES."));
  }
  HORON_CHECK(::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0,
              system_error_text("ftruncate", errno), " (", bytes, " bytes of shared memory)");
  const auto reserve = [&](std::uint64_t offset, std::uint64_t length) {
    return ::posix_fallocate(fd.get(), static_cast<off_t>(offset), static_cast<off_t>(length));
  };
  std::uint64_t done = 0;
  const int error = in_pieces(0, reserve_bytes, reserve, &done);
  HORON_CHECK(
      error == 0, system_error_text("posix_fallocate", error), ": could not reserve ",
      reserve_bytes,
      " bytes of shared memory. Free memory, enlarge /dev/shm, or lower HORON_BUFFER_BYTES.");
  if (sealable) {
    HORON_CHECK(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0,
                system_error_text("fcntl(F_ADD_SEALS)", errno));
  }
  return fd;
}

void check_shared_file(int fd, std::size_t bytes) {
  struct stat status{};
  HORON_CHECK(::fstat(fd, &status) == 0, system_error_text("fstat", errno));
  HORON_CHECK(static_cast<std::size_t>(status.st_size) == bytes, "shared memory has ",
              status.st_size, " bytes, expected ", bytes, ": the ranks run different builds.");
  // A file that is no memfd can not be sealed: fcntl fails, or shows the seal against seals alone.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  HORON_CHECK(seals < 0 || seals == F_SEAL_SEAL || (seals & F_SEAL_SHRINK) != 0,
              "shared memory from the peer could shrink under us; refusing to map it.");
}

}  // namespace horon
