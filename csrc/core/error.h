// What the engine throws. torch_backend translates these into c10's exceptions; nothing else does.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace horon {

// Base of everything the engine throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The ranks disagree about one call. Exactly that call fails, on every rank; the group stays
// usable.
class MismatchError : public Error {
 public:
  using Error::Error;
};

// The caller asked for something impossible; nothing was sent.
class UsageError : public Error {
 public:
  using Error::Error;
};

// The group can not go on: a deadline passed, a peer died or left, or somebody aborted.
class GroupError : public Error {
 public:
  using Error::Error;
};

// A deadline passed. The group is unusable afterwards, because buffers may be in use.
class TimeoutError : public GroupError {
 public:
  explicit TimeoutError(const std::string& text, std::vector<int> missing = {})
      : GroupError(text), missing_(std::move(missing)) {}

  // Ranks, as messages call them, that had not come; empty if that is not known.
  const std::vector<int>& missing() const { return missing_; }

 private:
  std::vector<int> missing_;
};

// A peer died or left while it was needed.
class PeerLostError : public GroupError {
 public:
  using GroupError::GroupError;
};

// A group has ended in an operation; what() says in which.
class EndedError : public GroupError {
 public:
  EndedError(const std::string& text, std::string reason, std::vector<int> missing)
      : GroupError(text), reason_(std::move(reason)), missing_(std::move(missing)) {}

  // Without the operation: "rank 1 (pid 4711) died (killed or crashed)".
  const std::string& reason() const { return reason_; }
  // As of a TimeoutError.
  const std::vector<int>& missing() const { return missing_; }

 private:
  std::string reason_;
  std::vector<int> missing_;
};

// Joins its arguments into one string.
template <typename... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

// "reason. The group can not be used any more; destroy it."
std::string group_over_text(const std::string& reason);

// "memfd_create: Operation not permitted" for the errno given; names the limit to raise, too, where
// it is one.
std::string system_error_text(const char* call, int error_number);

}  // namespace horon

// Throws horon::Error with the message parts when `condition` is false.
#define HORON_CHECK(condition, ...)                       \
  do {                                                    \
    if (!(condition)) {                                   \
      throw ::horon::Error(::horon::concat(__VA_ARGS__)); \
    }                                                     \
  } while (false)
