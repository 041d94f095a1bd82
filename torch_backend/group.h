// A process group's working parts: transport, lane, point-to-point engine. Made by the one factory
// that chooses transports.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "compat.h"
#include "core/fork_guard.h"
#include "core/lane.h"
#include "core/options.h"
#include "core/transport.h"
#include "device_side.h"
#include "gloo_adapter.h"
#include "gloo_meeting.h"
#include "p2p/p2p_engine.h"
#include "shm/rendezvous.h"
#include "watch/door_watch.h"

namespace horon::torch_backend {

// Thread safety: all methods.
class Group {
 public:
  // Meets the other ranks; blocks until all are here, at most until the deadline, or until
  // `look_around` throws, which is called now and then. Makes a Gloo group only when the ranks do
  // not all share memory and can not all connect.
  static std::shared_ptr<Group> make(const c10::intrusive_ptr<c10d::Store>& store,
                                     const GroupIdentity& identity, const Options& options,
                                     std::chrono::milliseconds timeout, const GlooMaker& make_gloo,
                                     std::function<void()> look_around = {});
  // Does nothing in a forked child, where the threads and the peers are somebody else's.
  ~Group();

  const std::shared_ptr<Lane>& lane() const { return lane_; }
  Transport& transport() { return *transport_; }
  // "shared memory"; between hosts "tcp" or "gloo", with "hosts, " in front where ranks of one host
  // share memory.
  const std::string& transport_name() const { return transport_name_; }
  // Null where Gloo carries what goes between hosts.
  P2pEngine* p2p() { return p2p_.get(); }
  // Null between hosts. Shared: a window's memory, and tensors that map a peer's, outlive the
  // group.
  const std::shared_ptr<SharedGroup>& shared() const { return shared_; }
  // Null within a host, and where our own connections carry everything.
  c10d::Backend* gloo() { return gloo_ ? &gloo_->gloo() : nullptr; }

  // What carries GPUs' tensors; null until it is first asked for.
  std::shared_ptr<DeviceSide> device_side() const {
    const std::lock_guard lock(device_side_mutex_);
    return device_side_;
  }
  // The one that is there, or what `make` makes.
  std::shared_ptr<DeviceSide> device_side(
      const std::function<std::shared_ptr<DeviceSide>()>& make) {
    const std::lock_guard lock(device_side_mutex_);
    if (!device_side_) {
      device_side_ = make();
    }
    return device_side_;
  }

  // Who of these has ended of those that share memory with this one: "rank 1 (pid 123)", numbered
  // as in the default group. Nobody, as far as a group knows that is closed, is the parent
  // process's, or has foreign ranks.
  std::optional<std::string> find_ended(const std::vector<int>& global_ranks) const;

  // The same of those on other hosts, as far as these say so (DoorWatch), and then takes whom it
  // knows off the list: nobody else need ask. May block for a fifth of a second.
  std::optional<std::string> find_ended_elsewhere(std::vector<int>* global_ranks) const;

  // Whose processes have ended: of the ranks that share memory with this one, and of those whose
  // hosts say so (DoorWatch); also after the group has. May block for a fifth of a second.
  std::vector<int> ended_ranks() const;

  // Its ranks are not numbered as in the default group. To be called before others see the group.
  void set_has_foreign_ranks() { has_foreign_ranks_ = true; }

  // Throws when this process is a forked child of the one that made the group.
  void check_process(const char* operation) const;

  // Lets pending operations finish (at most until `drain_until`), says goodbye. Idempotent.
  void shutdown(const Deadline& drain_until, Lane::Callers callers = Lane::Callers::kFail);
  // Fails everything pending, here and on all ranks. Idempotent.
  void abort(const std::string& reason_given);

  // Of operations that bring none of their own.
  std::chrono::milliseconds timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(std::chrono::milliseconds timeout) {
    timeout_.store(timeout, std::memory_order_relaxed);
  }

  // Numbers windows. Called in the lane's turn, when all ranks have agreed to make one.
  std::uint64_t next_window() { return ++windows_; }

  // False once it was shut down or aborted here.
  bool is_open() const { return is_open_.load(std::memory_order_relaxed); }
  bool has_failed() const { return has_failed_.load(std::memory_order_relaxed); }
  void set_failed() { has_failed_.store(true, std::memory_order_relaxed); }

 private:
  // The ranks that share memory with this one; null: there are none.
  const SharedGroup* on_this_host() const;
  // Whether it can say something of ranks of the default group.
  bool knows_global_ranks() const;
  int global_rank(int rank) const;

  // An abort often follows from a death that the aborting rank alone has noticed.
  std::string with_the_dead(const std::string& reason) const;

  explicit Group(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  const std::uint32_t fork_generation_ = fork_generation();
  bool has_foreign_ranks_ = false;  // constant once others see the group
  int n_ranks_ = 0;
  std::vector<int> global_ranks_;  // by rank; empty: the same
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> is_open_{true};
  std::atomic<std::chrono::milliseconds> timeout_;
  std::uint64_t windows_ = 0;  // belongs to whoever has the lane's turn
  // Order matters: the engines point into what is declared before them.
  std::shared_ptr<SharedGroup> shared_;
  std::shared_ptr<SharedGroup> on_host_;  // between hosts: what messages within a host go through
  std::shared_ptr<GlooAdapter> gloo_;
  std::unique_ptr<DoorWatch> doors_;  // null within a host
  std::string transport_name_ = "shared memory";
  std::unique_ptr<Transport> transport_;
  std::shared_ptr<P2pEngine> p2p_;  // its thread holds a share
  std::shared_ptr<Lane> lane_ = std::make_shared<Lane>();
  mutable std::mutex device_side_mutex_;
  std::shared_ptr<DeviceSide> device_side_;  // guarded by device_side_mutex_
};

}  // namespace horon::torch_backend
