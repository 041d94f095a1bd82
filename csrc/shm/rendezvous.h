// How the ranks of a new group find out whether they share memory, and get hold of it.
//
// Note [Rendezvous]
// 1. Each rank counts its own generation of this group in the store, so that keys are never reused.
//    Two processes with one rank are two generations; the second looks for the first.
// 2. Each publishes a record (host, settings, and on rank 0 the name of a socket and a nonce) and
//    reads all n. Different settings are an error on every rank.
// 3. If all claim the same host, rank 0 makes the segment; each other rank connects, proves that it
//    knows the nonce, hands over descriptors of its life and its arena and gets the segment and
//    everybody's.
// 4. Each rank reads the nonce back from the memory and publishes whether that worked. Only if it
//    worked for all do they use it: a rank in another container or namespace counts as another
//    host.
// 5. Who gives up (its time is over, a rank died, Ctrl-C) leaves a verdict. All others repeat it,
//    also those that come late. Only rank 0 knows who has not connected, so a rank whose time is
//    over asks it before it blames anybody.
// 6. A rank that could not map the others' arenas says so in the header of every operation: it need
//    not be agreed here.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/options.h"
#include "core/store.h"
#include "shm/group_arenas.h"
#include "shm/peer_arenas.h"
#include "shm/peers.h"
#include "shm/segment.h"
#include "shm/window_memory.h"

namespace horon {

struct GroupIdentity {
  int rank = 0;
  int n_ranks = 1;
  std::vector<int> global_ranks;
  // Of a part of a group's ranks: which of them each is, by rank. Empty: all.
  std::vector<int> numbers;
  // Ranks on this machine that compute at the same time, if more than these, and the cores that
  // they may use together.
  int n_on_machine = 0;
  double cpus_of_machine = 0;
};

// Of a group whose ranks do not all share memory.
struct Whereabouts {
  // Ranks with the same number are on one host, as far as they say. Empty: they say so of all, but
  // share no memory.
  std::vector<int> hosts;
  // Ranks on this rank's machine, whatever hosts they count as, and the cores that they may use.
  int n_on_machine = 1;
  double cpus_of_machine = 1;
};

// What a group on one host shares.
struct SharedGroup {
  Segment segment;
  Peers peers;
  GroupArenas arenas;
};

// What a process has of arenas, for all of its groups.
struct ArenaAccess {
  std::shared_ptr<Arena> own;          // may be null
  std::shared_ptr<PeerArenas> mapped;  // null: this process can not read the peers' arenas
  std::shared_ptr<LentMemory> lent;    // of windows; null: this process makes none
};

// Nothing when the ranks do not all share memory; `whereabouts`, unless it is null, then tells
// where they are. Blocks until all ranks are here.
// Throws TimeoutError (naming the missing rank), UsageError (settings or builds differ), Error.
std::unique_ptr<SharedGroup> rendezvous(Store& store, const GroupIdentity& identity,
                                        const Options& options, const Deadline& deadline,
                                        const ArenaAccess& arenas = {},
                                        Whereabouts* whereabouts = nullptr);

// Steps 1 and 2 alone, for who begins several things on one store that must not meet those of an
// earlier beginning. Returns the generation, under which all ranks then find each other's things.
// Throws TimeoutError, UsageError (two processes with one rank, settings differ), Error.
std::int64_t call_roll(Store& store, const GroupIdentity& identity, const Options& options,
                       const Deadline& deadline);

}  // namespace horon
