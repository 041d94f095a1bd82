// The two sides of a point-to-point message, as the p2p engine keeps them.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "core/deadline.h"
#include "core/request.h"

namespace horon {

inline constexpr int kAnySource = -1;

// One send or receive. Ownership: shared by the engine and by who waits; `data` belongs to the
// caller, who keeps it alive until complete().
struct P2pOp {
  P2pOp() = default;
  virtual ~P2pOp() = default;
  P2pOp(const P2pOp&) = delete;
  P2pOp& operator=(const P2pOp&) = delete;

  // Tells whoever waits or polls. Called once, with no lock held, on any thread. The error is null
  // on success; `source` is the sender of a receive.
  virtual void complete(const std::exception_ptr& error, int source) noexcept = 0;
  // Then tells those that wanted to be called, who may start operations and wait for them. Called
  // once, with no lock held, on any thread; it may be some time later. See Note [Nested callbacks]
  // in nesting.h.
  virtual void call_back() noexcept {}

  // Whether who waits (see P2pEngine::help_until) waits for this one. Called while it is pending.
  virtual bool is_for(const void* /*waiter*/) const { return false; }

  bool is_send = false;
  int peer = 0;  // kAnySource for a receive from anybody
  int tag = 0;
  std::byte* data = nullptr;  // only read when sending
  std::uint64_t bytes = 0;
  Deadline deadline = Deadline::after(std::chrono::milliseconds(0));

  // Kept by the engine:
  std::uint64_t id = 0;           // of a send
  std::uint64_t transferred = 0;  // payload bytes already in or out of a ring
  std::uint64_t put_until = 0;    // where an eager message ends in what a socket was given
  bool is_eager = false;
  Clock::time_point buffered_at{};  // when an eager message was wholly in the ring
  std::exception_ptr error;
  int source = 0;

  // "send of 16 bytes to rank 1, tag 0".
  std::string describe() const;
};

// A message that arrived before its receive.
struct UnexpectedMessage {
  int source = 0;
  int tag = 0;
  std::uint64_t id = 0;
  std::uint64_t bytes = 0;
  bool is_eager = false;
  std::unique_ptr<std::byte[]> payload;  // of an eager one
};

}  // namespace horon
