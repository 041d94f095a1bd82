#include "group.h"

#include <algorithm>
#include <new>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "carrier.h"
#include "core/environment.h"
#include "core/error.h"
#include "core/log.h"
#include "cross/cross_transport.h"
#include "hosts.h"
#include "own_post.h"
#include "process_arena.h"
#include "shm/lone_group.h"
#include "shm/shm_transport.h"
#include "store_adapter.h"

namespace horon::torch_backend {
namespace {

// A healthy shutdown waits no longer for messages that nobody receives.
constexpr std::chrono::seconds kMessageDrain{2};
// All have just connected.
constexpr std::chrono::milliseconds kDoorPatience{500};

struct CrossParts {
  std::unique_ptr<Transport> transport;
  std::string description;
  std::shared_ptr<GlooAdapter> gloo;  // null where our own connections carry everything
  // Of messages; null where Gloo carries them.
  std::shared_ptr<SharedGroup> on_host;
  std::shared_ptr<P2pEngine> p2p;
  std::unique_ptr<DoorWatch> doors;
};

// Where ranks are for messages, with a connection to those that share no memory with this one.
P2pRoster make_roster(const GroupIdentity& identity, const HostLayout* layout,
                      std::vector<RemotePeer> peers) {
  P2pRoster roster;
  roster.rank = identity.rank;
  roster.global_ranks = identity.global_ranks;
  roster.local.assign(static_cast<std::size_t>(identity.n_ranks), -1);
  roster.local[static_cast<std::size_t>(identity.rank)] = 0;
  for (std::size_t i = 0; layout != nullptr && i < layout->neighbours().size(); ++i) {
    roster.local[static_cast<std::size_t>(layout->neighbours()[i])] = static_cast<int>(i);
  }
  for (RemotePeer& peer : peers) {
    if (roster.local[static_cast<std::size_t>(peer.rank)] < 0) {
      roster.remote.push_back(std::move(peer));
    }
  }
  return roster;
}

CrossParts make_cross_transport(const c10::intrusive_ptr<c10d::Store>& store,
                                const GroupIdentity& identity, const Options& options,
                                const Deadline& deadline, const Whereabouts& whereabouts,
                                std::int64_t attempt, const GlooMaker& make_gloo,
                                const std::function<void()>& look_around) {
  const auto below = [&](const c10::intrusive_ptr<c10d::Store>& whole, const char* what) {
    return c10::make_intrusive<c10d::PrefixStore>(concat(what, '/', attempt), whole);
  };
  const auto make_adapter = [&](const c10::intrusive_ptr<c10d::Store>& where, int rank, int n) {
    return std::make_shared<GlooAdapter>(
        make_gloo_group(where, rank, n, attempt, make_gloo, deadline, look_around, identity.rank));
  };
  CrossParts parts;
  Connected own;
  if (options.carrier != "gloo") {
    own = connect_all_or_none(below(store, "carrier"), identity.rank, identity.n_ranks, deadline,
                              look_around);
  }
  const bool is_own = own.bytes != nullptr;
  if (!is_own) {
    parts.gloo = make_adapter(store, identity.rank, identity.n_ranks);
  }
  std::shared_ptr<ByteTransport> all = is_own ? own.bytes : parts.gloo;
  const auto make_column = [&](const c10::intrusive_ptr<c10d::Store>& of_column, int rank,
                               const std::vector<int>& numbers) -> std::shared_ptr<ByteTransport> {
    if (is_own) {
      return connect_all(below(of_column, "carrier"), rank, numbers, false, deadline, look_around)
          .bytes;
    }
    return make_adapter(of_column, rank, static_cast<int>(numbers.size()));
  };
  Hosts hosts = make_hosts(below(store, "hosts"), identity, options, deadline, whereabouts, *all,
                           make_column, look_around);
  parts.description = concat(hosts.collectives ? "hosts, " : "", is_own ? "tcp" : "gloo");
  auto transport = std::make_unique<CrossTransport>(std::move(all), identity.rank, identity.n_ranks,
                                                    std::move(hosts.collectives));
  if (is_own) {  // messages and collectives are over together, as where ranks share memory
    parts.on_host = hosts.own ? hosts.own : lone_group(options, whereabouts);
    P2pRoster roster =
        make_roster(identity, hosts.own ? &hosts.layout : nullptr, std::move(own.for_messages));
    roster.on_end = [to = transport.get()](const std::string& reason) { to->abort(reason); };
    parts.p2p = std::make_shared<P2pEngine>(&parts.on_host->segment, &parts.on_host->peers,
                                            options.fitting_eager_bytes(), std::move(roster));
    transport->set_on_end([to = std::weak_ptr<P2pEngine>(parts.p2p)](const std::string& reason) {
      if (const auto engine = to.lock()) {
        engine->abort(reason);
      }
    });
  }
  parts.doors = std::make_unique<DoorWatch>(std::move(own.doors));
  const Deadline soon = Deadline::after(kDoorPatience);
  parts.doors->reach(soon.at() < deadline.at() ? soon : deadline);
  parts.transport = std::move(transport);
  return parts;
}

}  // namespace

std::shared_ptr<Group> Group::make(const c10::intrusive_ptr<c10d::Store>& store,
                                   const GroupIdentity& identity, const Options& options,
                                   std::chrono::milliseconds timeout, const GlooMaker& make_gloo,
                                   std::function<void()> look_around) {
  options.validate();
  (void)stall_check_from_environment();  // what is wrong with them is said here
  (void)watch_from_environment();
  std::shared_ptr<Group> group(new Group(timeout));
  group->n_ranks_ = identity.n_ranks;
  group->global_ranks_ = identity.global_ranks;
  const Deadline deadline = Deadline::after(timeout);  // of everything together
  StoreAdapter adapter(store, std::move(look_around));
  // Here, where all ranks come by: groups of one name come again on the same store.
  const std::int64_t attempt = adapter.add(concat("gloo/attempt/", identity.rank), 1);
  Whereabouts whereabouts;
  group->shared_ = rendezvous(adapter, identity, options, deadline, arena_access(), &whereabouts);
  if (group->shared_) {
    publish_own_post(*group->shared_);
    Segment* segment = &group->shared_->segment;
    const Peers* peers = &group->shared_->peers;
    group->transport_ = std::make_unique<ShmTransport>(segment, peers, &group->shared_->arenas);
    group->p2p_ = std::make_shared<P2pEngine>(segment, peers, options.fitting_eager_bytes());
  } else {
    const auto look = [&] { adapter.look_around(); };
    CrossParts parts = make_cross_transport(store, identity, options, deadline, whereabouts,
                                            attempt, make_gloo, look);
    group->gloo_ = std::move(parts.gloo);
    group->doors_ = std::move(parts.doors);
    group->transport_ = std::move(parts.transport);
    group->transport_name_ = std::move(parts.description);
    group->on_host_ = std::move(parts.on_host);
    if (group->on_host_) {
      publish_own_post(*group->on_host_);
    }
    group->p2p_ = std::move(parts.p2p);
  }
  return group;
}

Group::~Group() {
  if (fork_generation_ != fork_generation()) {
    // Joining, unlocking or unmapping here could only disturb the parent or hang.
    (void)new (std::nothrow) std::shared_ptr<SharedGroup>(std::move(shared_));
    (void)new (std::nothrow) std::shared_ptr<SharedGroup>(std::move(on_host_));
    (void)transport_.release();
    (void)new (std::nothrow) std::shared_ptr<P2pEngine>(std::move(p2p_));
    (void)new (std::nothrow) std::shared_ptr<Lane>(std::move(lane_));
    (void)new (std::nothrow) std::shared_ptr<GlooAdapter>(std::move(gloo_));
    (void)new (std::nothrow) std::shared_ptr<DeviceSide>(std::move(device_side_));
    return;
  }
  shutdown(Deadline::after(std::chrono::milliseconds(0)));
}

bool Group::knows_global_ranks() const {
  return is_open() && !has_foreign_ranks_ && fork_generation_ == fork_generation();
}

const SharedGroup* Group::on_this_host() const { return shared_ ? shared_.get() : on_host_.get(); }

int Group::global_rank(int rank) const {
  return global_ranks_.empty() ? rank : global_ranks_[static_cast<std::size_t>(rank)];
}

std::optional<std::string> Group::find_ended(const std::vector<int>& global_ranks) const {
  const SharedGroup* const here = on_this_host();
  if (here == nullptr || !knows_global_ranks()) {
    return std::nullopt;
  }
  const Peers& peers = here->peers;
  for (int rank = 0; rank < peers.n_ranks(); ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    const int global_rank = this->global_rank(peers.number(rank));
    if (rank != peers.rank &&
        std::find(global_ranks.begin(), global_ranks.end(), global_rank) != global_ranks.end() &&
        has_ended(peers.peers[index].liveness_fd.get())) {
      return concat("rank ", global_rank, " (pid ", peers.peers[index].pid, ")");
    }
  }
  return std::nullopt;
}

std::optional<std::string> Group::find_ended_elsewhere(std::vector<int>* global_ranks) const {
  if (!doors_ || !knows_global_ranks()) {
    return std::nullopt;
  }
  std::vector<int> wanted;
  for (int rank = 0; rank < n_ranks_; ++rank) {
    if (std::find(global_ranks->begin(), global_ranks->end(), global_rank(rank)) !=
        global_ranks->end()) {
      wanted.push_back(rank);
    }
  }
  if (const auto ended = doors_->ended_of(wanted); !ended.empty()) {
    const DoorWatch::Neighbour& first = ended.front();
    const int global_rank = this->global_rank(first.rank);
    return global_rank == first.rank
               ? first.description
               : concat("rank ", global_rank, ", ", first.description, " of another group");
  }
  for (const int rank : doors_->known_of(wanted)) {
    std::erase(*global_ranks, global_rank(rank));
  }
  return std::nullopt;
}

std::vector<int> Group::ended_ranks() const {
  if (fork_generation_ != fork_generation()) {
    return {};
  }
  std::vector<int> ended = doors_ ? doors_->ended() : std::vector<int>();
  const SharedGroup* const here = on_this_host();
  if (here == nullptr) {
    return ended;
  }
  const Peers& peers = here->peers;
  for (int rank = 0; rank < peers.n_ranks(); ++rank) {
    if (rank != peers.rank &&
        has_ended(peers.peers[static_cast<std::size_t>(rank)].liveness_fd.get())) {
      ended.push_back(peers.number(rank));
    }
  }
  std::sort(ended.begin(), ended.end());
  ended.erase(std::unique(ended.begin(), ended.end()), ended.end());
  return ended;
}

void Group::check_process(const char* operation) const {
  TORCH_CHECK(
      fork_generation_ == fork_generation(), "horon: ", operation,
      ": this process was forked from the one that made the process group. A group can not be ",
      "used across fork(); create a new one in the child, or start children with spawn.");
}

void Group::shutdown(const Deadline& drain_until, Lane::Callers callers) {
  if (fork_generation_ != fork_generation()) {
    return;
  }
  is_open_.store(false, std::memory_order_relaxed);
  if (!transport_) {
    return;  // make() threw half-way
  }
  if (const auto side = device_side()) {
    side->shutdown(drain_until);
  }
  const auto interrupt = [this] {
    transport_->abort("the group was shut down while an operation was running");
  };
  lane_->close(drain_until, interrupt, callers);
  if (p2p_) {
    const Deadline patience = Deadline::after(kMessageDrain);
    p2p_->close(patience.at() < drain_until.at() ? patience : drain_until,
                "the process group was destroyed");
  }
  transport_->depart();
}

std::string Group::with_the_dead(const std::string& reason) const {
  std::string text = reason;
  for (int rank = 0; shared_ && rank < shared_->peers.n_ranks(); ++rank) {
    const Peers& peers = shared_->peers;
    if (rank != peers.rank &&
        shared_->segment.words(rank).departed.load(std::memory_order_acquire) == 0 &&
        has_ended(peers.peers[static_cast<std::size_t>(rank)].liveness_fd.get())) {
      text += concat("; ", peers.describe(rank), " died");
    }
  }
  return text;
}

void Group::abort(const std::string& reason_given) {
  if (fork_generation_ != fork_generation()) {
    return;
  }
  const std::string reason = with_the_dead(reason_given);
  is_open_.store(false, std::memory_order_relaxed);
  set_failed();
  transport_->abort(reason);
  if (const auto side = device_side()) {
    side->abort(reason);
  }
  const Deadline now = Deadline::after(std::chrono::milliseconds(0));
  lane_->close(now, [&] { transport_->abort(reason); });
  if (p2p_) {
    p2p_->abort(reason);
    p2p_->close(now, reason);
  }
  transport_->depart();
}

}  // namespace horon::torch_backend
