// NCCL's functions that make and end communicators.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>

#include "last_error.h"
#include "nccl_group.h"

namespace horon::simulator {
namespace {

// 64 bits of FNV-1a.
std::uint64_t hash_of(std::uint64_t hash, const std::string& text) {
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

// Of a communicator that is made from another one; of a length that does not grow.
std::string name_of_child(const std::string& parent, const std::string& difference) {
  std::string name;
  for (const std::uint64_t start : {0xcbf29ce484222325, 0x84222325cbf29ce4}) {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx",
                  static_cast<unsigned long long>(hash_of(hash_of(start, parent), difference)));
    name += text;
  }
  return name;
}

// Of NCCL_CONFIG_INITIALIZER; not every version has a name for it.
constexpr unsigned kConfigMagic = 0xcafebeef;

bool is_valid(const ncclConfig_t* config) {
  return config == nullptr || config->magic == kConfigMagic;
}

bool wants_blocking(const ncclConfig_t* config, bool otherwise) {
  return config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT ? otherwise
                                                                        : config->blocking != 0;
}

// Makes a handle at once; the communicator is there when the group's step is done.
ncclResult_t init(ncclComm_t* comm, int n_ranks, const ncclUniqueId& id, int rank,
                  const ncclConfig_t* config) {
  begin_group();
  if (comm == nullptr || n_ranks < 1 || rank < 0 || rank >= n_ranks || !is_valid(config)) {
    fail_group(ncclInvalidArgument, "ncclCommInitRank: invalid rank, count or config");
    return end_group();
  }
  if (!is_device(current_device())) {
    fail_group(ncclUnhandledCudaError, "ncclCommInitRank: no CUDA device");
    return end_group();
  }
  auto made = std::make_shared<Communicator>(current_device(), wants_blocking(config, true));
  *comm = make_handle(made);
  const std::string name(id.internal, strnlen(id.internal, 64));
  add_step(*comm, [made, name, rank, n_ranks] { return made->connect(name, rank, n_ranks); });
  return end_group();
}

// Who becomes which rank of a child; empty for a rank that is in none.
struct Place {
  std::string id;
  int rank;
  int n_ranks;
};

// The ranks with our color, by key and then rank.
std::optional<Place> place_in_split(Communicator& parent, int color, int key) {
  const int number = parent.next_child();
  const auto all = parent.exchange({color, key});
  if (all.empty() || color < 0) {
    return std::nullopt;
  }
  std::vector<std::pair<int, int>> members;
  for (int rank = 0; rank < parent.n_ranks(); ++rank) {
    const auto& theirs = all[static_cast<std::size_t>(rank)];
    if (theirs[0] == color) {
      members.emplace_back(theirs[1], rank);
    }
  }
  std::sort(members.begin(), members.end());
  const auto ours = std::find(members.begin(), members.end(), std::pair(key, parent.rank()));
  return Place{name_of_child(parent.id(), std::to_string(number) + "/" + std::to_string(color)),
               static_cast<int>(ours - members.begin()), static_cast<int>(members.size())};
}

// Needs no exchange: the ranks that are left know each other.
std::optional<Place> place_in_shrink(Communicator& parent, const std::vector<int>& excluded) {
  const auto is_left = [&](int rank) {
    return std::find(excluded.begin(), excluded.end(), rank) == excluded.end();
  };
  if (!is_left(parent.rank())) {
    return std::nullopt;
  }
  Place place{"shrink " + std::to_string(parent.next_child()), 0, 0};
  for (int rank = 0; rank < parent.n_ranks(); ++rank) {
    if (is_left(rank)) {
      place.rank += rank < parent.rank() ? 1 : 0;
      place.n_ranks += 1;
      place.id += "/" + std::to_string(rank);
    }
  }
  place.id = name_of_child(parent.id(), place.id);
  return place;
}

std::shared_ptr<Communicator> child_of(const Communicator& parent, const ncclConfig_t* config) {
  return std::make_shared<Communicator>(parent.device(),
                                        wants_blocking(config, parent.is_blocking()));
}

}  // namespace
}  // namespace horon::simulator

using namespace horon::simulator;

HORON_SIMULATOR_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  std::memset(id->internal, 0, sizeof id->internal);
  std::snprintf(id->internal, sizeof id->internal, "%08x%08x%08x%08x", random(), random(), random(),
                static_cast<unsigned>(getpid()));
  return ncclSuccess;
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int n_ranks,
                                                           ncclUniqueId id, int rank,
                                                           ncclConfig_t* config) {
  return init(comm, n_ranks, id, rank, config);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int n_ranks, ncclUniqueId id,
                                                     int rank) {
  return init(comm, n_ranks, id, rank, nullptr);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int n_ranks,
                                                             int rank, int /*n_ids*/,
                                                             ncclUniqueId* ids,
                                                             ncclConfig_t* config) {
  return init(comm, n_ranks, ids[0], rank, config);
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommInitAll(ncclComm_t* comms, int n_devices,
                                                    const int* devices) {
  const int before = current_device();
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  begin_group();
  for (int rank = 0; rank < n_devices; ++rank) {
    set_current_device(devices == nullptr ? rank : devices[rank]);
    init(&comms[rank], n_devices, id, rank, nullptr);
  }
  set_current_device(before);
  return end_group();
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key,
                                                  ncclComm_t* child, ncclConfig_t* config) {
  begin_group();
  if (check_ready(comm) != ncclSuccess) {
    return end_group();
  }
  if (!is_valid(config) || child == nullptr) {
    fail_group(ncclInvalidArgument, "ncclCommSplit: invalid config or child");
    return end_group();
  }
  const auto parent = comm->communicator;
  *child = nullptr;
  std::shared_ptr<Communicator> made;
  if (color >= 0) {
    made = child_of(*parent, config);
    *child = make_handle(made);
    made->set_in_progress(true);
  }
  add_step(comm, [parent, made, color, key] {
    const std::optional<Place> place = place_in_split(*parent, color, key);
    ncclResult_t result = ncclSuccess;
    if (made != nullptr) {
      parent->set_child(made);
      if (parent->is_aborted()) {  // perhaps before it knew the child
        made->abort();
      }
      result = place ? made->connect(place->id, place->rank, place->n_ranks)
                     : made->fail(ncclInternalError, "ncclCommSplit: aborted");
      parent->set_child(nullptr);
      made->set_in_progress(false);
    }
    return result;
  });
  return end_group();
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int n_excluded,
                                                   ncclComm_t* child, ncclConfig_t* config,
                                                   int flags) {
  begin_group();
  const bool aborts = (flags & NCCL_SHRINK_ABORT) != 0;
  if (aborts && is_handle(comm)) {
    comm->communicator->abort();
  } else if (check_ready(comm) != ncclSuccess) {
    return end_group();
  }
  const auto parent = comm->communicator;
  const auto place = place_in_shrink(*parent, {excluded, excluded + n_excluded});
  if (!is_valid(config) || child == nullptr || !place) {
    fail_group(ncclInvalidArgument, "ncclCommShrink: invalid config or child, or excluded rank");
    return end_group();
  }
  const auto made = child_of(*parent, config);
  *child = make_handle(made);
  made->set_in_progress(true);
  add_step(comm, [parent, made, place = *place] {
    parent->set_child(made);
    const ncclResult_t result = made->connect(place.id, place.rank, place.n_ranks);
    parent->set_child(nullptr);
    made->set_in_progress(false);
    return result;
  });
  return end_group();
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  begin_group();
  if (check_ready(comm) == ncclSuccess) {
    add_step(comm, [communicator = comm->communicator] {
      communicator->flush();
      return ncclSuccess;
    });
  }
  return end_group();
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm == nullptr) {
    return ncclSuccess;
  }
  if (!is_handle(comm)) {
    return fail_group(ncclInvalidArgument, "ncclCommDestroy: no communicator");
  }
  const auto communicator = comm->communicator;
  forget_handle(comm);
  communicator->flush();
  communicator->close();
  return ncclSuccess;
}

HORON_SIMULATOR_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm == nullptr) {
    return ncclSuccess;
  }
  if (!is_handle(comm)) {
    return fail_group(ncclInvalidArgument, "ncclCommAbort: no communicator");
  }
  comm->communicator->abort();  // ends the job, too
  forget_handle(comm);
  return ncclSuccess;
}
