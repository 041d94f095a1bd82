// One rank of a group as point-to-point tests use it.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <random>
#include <vector>

#include "p2p/p2p_engine.h"
#include "rank_threads.h"

namespace horon::testing {

using Bytes = std::vector<std::byte>;

inline Bytes message(unsigned seed, std::size_t bytes) {
  std::minstd_rand random(seed + 1);
  Bytes data(bytes);
  for (std::byte& byte : data) {
    byte = static_cast<std::byte>(random() >> 9);
  }
  return data;
}

// A message made of functions.
struct TestMessage final : P2pOp {
  std::function<void(std::exception_ptr error, int source)> on_done;  // in complete()
  std::function<void()> callback;                                     // in call_back()

  void complete(const std::exception_ptr& failure, int from) noexcept override {
    if (on_done) {
      on_done(failure, from);
    }
  }
  void call_back() noexcept override {
    if (callback) {
      callback();
    }
  }
};

// One operation and its outcome. May go away before the operation has finished.
class Pending {
 public:
  Pending(bool is_send, int peer, int tag, Bytes data, const Deadline& deadline)
      : outcome_(state_->done.get_future()) {
    state_->data = std::move(data);
    op_->is_send = is_send;
    op_->peer = peer;
    op_->tag = tag;
    op_->data = state_->data.data();
    op_->bytes = state_->data.size();
    op_->deadline = deadline;
    op_->on_done = [state = state_](std::exception_ptr error, int source) {
      state->source = source;
      state->done.set_value(std::move(error));  // a second call would throw
    };
  }

  void start(P2pEngine& engine) { engine.start(op_); }
  std::exception_ptr error() {
    if (outcome_.wait_until(Deadline::after(std::chrono::seconds(100)).at()) !=
        std::future_status::ready) {
      std::cerr << op_->describe() << " hangs; giving up\n";
      std::abort();
    }
    return outcome_.get();
  }
  // Waits as a caller does that moves messages itself.
  void help(P2pEngine& engine, const std::function<void()>* check_interrupt = nullptr) {
    engine.help_until([this] { return is_done(); }, check_interrupt);
    finish();
  }
  void finish() {
    if (const std::exception_ptr failure = error()) {
      std::rethrow_exception(failure);
    }
  }
  bool is_done() const {
    return outcome_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  const Bytes& data() const { return state_->data; }
  int source() const { return state_->source; }

 private:
  struct State {
    Bytes data;
    int source = -7;
    std::promise<std::exception_ptr> done;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();  // shared with on_done
  std::future<std::exception_ptr> outcome_;
  std::shared_ptr<TestMessage> op_ = std::make_shared<TestMessage>();
};

// One rank's engine, closed at the end of the test.
class Endpoint {
 public:
  Endpoint(const LocalGroup& group, int rank)
      : engine_(std::make_shared<P2pEngine>(group.segment(rank), group.peers(rank),
                                            small_options().eager_bytes)) {}
  // Of a group that spans hosts: `group` is this rank's host.
  Endpoint(const LocalGroup& group, int index, P2pRoster roster)
      : engine_(std::make_shared<P2pEngine>(group.segment(index), group.peers(index),
                                            small_options().eager_bytes, std::move(roster))) {}
  ~Endpoint() { engine_->close(Deadline::after(std::chrono::milliseconds(0)), "the test is over"); }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  std::unique_ptr<Pending> send(int peer, int tag, Bytes data,
                                const Deadline& deadline = patient()) {
    return begin(true, peer, tag, std::move(data), deadline);
  }
  std::unique_ptr<Pending> receive(int peer, int tag, std::size_t bytes,
                                   const Deadline& deadline = patient()) {
    return begin(false, peer, tag, Bytes(bytes), deadline);
  }
  P2pEngine& engine() { return *engine_; }

 private:
  std::unique_ptr<Pending> begin(bool is_send, int peer, int tag, Bytes data,
                                 const Deadline& deadline) {
    auto pending = std::make_unique<Pending>(is_send, peer, tag, std::move(data), deadline);
    pending->start(*engine_);
    return pending;
  }

  const std::shared_ptr<P2pEngine> engine_;
};

}  // namespace horon::testing
