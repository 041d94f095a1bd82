#include "hosts.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <utility>
#include <vector>

#include "carrier.h"
#include "core/error.h"
#include "core/log.h"
#include "core/rank_list.h"
#include "process_arena.h"
#include "shm/shm_transport.h"
#include "store_adapter.h"

namespace horon::torch_backend {
namespace {

c10::intrusive_ptr<c10d::Store> below(const c10::intrusive_ptr<c10d::Store>& store,
                                      const std::string& prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

// This rank among those of its host.
GroupIdentity on_own_host(const GroupIdentity& identity, const HostLayout& layout,
                          const Whereabouts& whereabouts) {
  GroupIdentity own;
  own.rank = static_cast<int>(layout.own_index);
  own.n_ranks = static_cast<int>(layout.neighbours().size());
  own.numbers = layout.neighbours();
  for (const int rank : layout.neighbours()) {
    if (!identity.global_ranks.empty()) {
      own.global_ranks.push_back(identity.global_ranks[static_cast<std::size_t>(rank)]);
    }
  }
  own.n_on_machine = whereabouts.n_on_machine;
  own.cpus_of_machine = whereabouts.cpus_of_machine;
  return own;
}

}  // namespace

Hosts make_hosts(const c10::intrusive_ptr<c10d::Store>& store, const GroupIdentity& identity,
                 const Options& options, const Deadline& deadline, const Whereabouts& whereabouts,
                 ByteTransport& all, const ColumnMaker& make_column,
                 const std::function<void()>& look_around) {
  if (!options.hierarchical || whereabouts.hosts.empty()) {
    return {};
  }
  Hosts made;
  HostCollectives::Parts parts;
  made.layout = lay_out(whereabouts.hosts, identity.rank);
  parts.layout = made.layout;
  const HostLayout& layout = parts.layout;
  if (!has_neighbours(layout)) {
    return {};
  }
  bool is_ready = true;
  if (layout.neighbours().size() > 1) {
    StoreAdapter meeting(below(store, concat("host/", layout.neighbours().front())), look_around);
    std::shared_ptr<SharedGroup> shared = rendezvous(
        meeting, on_own_host(identity, layout, whereabouts), options, deadline, arena_access());
    is_ready = shared != nullptr;
    if (shared) {
      parts.local =
          std::make_unique<ShmTransport>(&shared->segment, &shared->peers, &shared->arenas);
      made.own = shared;
      parts.kept = std::move(shared);
    }
  }
  const WaitContext context{deadline, &look_around};
  if (!is_so_on_all(is_ready, all, identity.n_ranks, context)) {
    return {};
  }
  if (layout.is_in_column()) {
    std::vector<int> ranks;
    ranks.reserve(layout.n_hosts());
    for (const std::vector<int>& of_host : layout.hosts) {
      ranks.push_back(of_host[layout.own_index]);
    }
    try {
      parts.column = make_column(below(store, concat("column/", layout.own_index)),
                                 static_cast<int>(layout.own_host), ranks);
    } catch (const PeerLostError&) {
      throw;
    } catch (const Error& error) {
      log_warning_once("column", concat("rank ", identity.rank, " could not connect to ",
                                        name_ranks(ranks), " once more, so that ranks of one host ",
                                        "exchange everything as those of several: ", error.what()));
    }
  }
  const bool is_connected = parts.column != nullptr || !layout.is_in_column();
  if (!is_so_on_all(is_connected, all, identity.n_ranks, context)) {
    return {};
  }
  made.collectives = std::make_unique<HostCollectives>(std::move(parts));
  return made;
}

}  // namespace horon::torch_backend
