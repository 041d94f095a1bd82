// A descriptor that a forked child must not keep open: while it has a socket, the peer can not see
// that the parent died.
#pragma once

namespace horon {

// Closes `fd` in every child that is forked while this object lives. Does not own it here.
class ClosedInChild {
 public:
  explicit ClosedInChild(int fd);
  ~ClosedInChild();
  ClosedInChild(const ClosedInChild&) = delete;
  ClosedInChild& operator=(const ClosedInChild&) = delete;

 private:
  const int fd_;
};

}  // namespace horon
