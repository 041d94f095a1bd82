#include "shm/rendezvous.h"

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <random>
#include <sstream>

#include "core/error.h"
#include "core/header.h"
#include "core/log.h"
#include "shm/unix_socket.h"

namespace horon {
namespace {

constexpr std::chrono::milliseconds kAcceptSlice{50};
// A member sends its greeting right after connecting.
constexpr std::chrono::seconds kHelloPatience{5};
constexpr int kProtocolVersion = 1;
constexpr std::size_t kDescriptorsPerMessage = 200;

// One line per field, so that a person can read a store.
struct Record {
  std::string host;
  std::string settings;
  std::string socket_name;
  std::uint64_t nonce = 0;
  std::int64_t pid = 0;

  std::string encode() const {
    return concat(host, '\n', settings, '\n', socket_name, '\n', nonce, '\n', pid, '\n');
  }

  static Record decode(const std::string& text) {
    Record record;
    std::istringstream in(text);
    std::getline(in, record.host);
    std::getline(in, record.settings);
    std::getline(in, record.socket_name);
    in >> record.nonce >> record.pid;
    HORON_CHECK(!in.fail(), "rendezvous: a rank's record in the store is damaged: '", text, "'");
    return record;
  }
};

std::string host_identity(const Options& options) {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  return concat(boot_id, '/', ::getuid(), '/', options.host_id);
}

std::uint64_t random_nonce() {
  std::random_device random;
  return (std::uint64_t{random()} << 32) | random();
}

class Rendezvous {
 public:
  Rendezvous(Store& store, const GroupIdentity& identity, const Options& options,
             const Deadline& deadline)
      : store_(store),
        identity_(identity),
        layout_(identity.n_ranks, options),
        options_(options),
        deadline_(deadline) {}

  std::unique_ptr<SharedGroup> run() {
    const std::int64_t generation = store_.add(concat("horon/generation/", identity_.rank), 1);
    prefix_ = concat("horon/", generation, '/');
    exchange_records();
    if (!same_host()) {
      return nullptr;
    }
    std::string failure;
    std::unique_ptr<SharedGroup> group;
    try {
      group = identity_.rank == 0 ? lead() : join();
    } catch (const Error& error) {
      failure = error.what();
    }
    return agree(failure) ? std::move(group) : nullptr;
  }

 private:
  void exchange_records() {
    Record own;
    own.host = host_identity(options_);
    own.settings = concat("version=", kProtocolVersion, " words=", sizeof(RankWords),
                          " header=", sizeof(Header), ' ', options_.fingerprint());
    own.pid = ::getpid();
    if (identity_.rank == 0) {
      own.nonce = random_nonce();
      char name[40];
      std::snprintf(name, sizeof name, "horon-%016llx",
                    static_cast<unsigned long long>(random_nonce()));
      own.socket_name = name;
      if (identity_.n_ranks > 1) {
        listener_ = listen_on(own.socket_name);  // before anybody can know the name
      }
    }
    store_.set(key("member", identity_.rank), own.encode());
    for (int rank = 0; rank < identity_.n_ranks; ++rank) {
      records_.push_back(rank == identity_.rank ? own : Record::decode(get("member", rank)));
    }
    for (int rank = 1; rank < identity_.n_ranks; ++rank) {
      const std::string& settings = records_[static_cast<std::size_t>(rank)].settings;
      if (settings != records_[0].settings) {
        throw UsageError(concat("the ranks of a group have different settings or builds: rank 0 ",
                                records_[0].settings, "; rank ", rank, ' ', settings,
                                ". Give all ranks the same HORON_ variables and horon version."));
      }
    }
  }

  bool same_host() const {
    for (const Record& record : records_) {
      if (record.host != records_[0].host) {
        return false;
      }
    }
    return true;
  }

  // Rank 0: makes the segment, collects everybody's descriptor, hands out all of them.
  std::unique_ptr<SharedGroup> lead() {
    const UniqueFd file = create_shared_file(layout_.total_bytes(), layout_.reserved_bytes());
    auto group = make_group(file.get());
    group->segment.head().nonce = records_[0].nonce;
    group->peers.peers[0].liveness_fd = open_own_liveness();
    std::vector<UniqueFd> sockets(static_cast<std::size_t>(identity_.n_ranks));
    for (int missing = identity_.n_ranks - 1; missing > 0;) {
      UniqueFd socket = accept_until(listener_.get(), Deadline::after(kAcceptSlice));
      if (!socket) {
        HORON_CHECK(store_.add(prefix_ + "failures", 0) == 0, "a rank could not connect");
        if (deadline_.has_passed()) {
          throw TimeoutError("Timed out waiting for the ranks of this host to connect");
        }
        continue;
      }
      std::vector<UniqueFd> descriptors;
      SocketMessage hello;
      try {
        hello = receive_message(socket.get(), &descriptors, Deadline::after(kHelloPatience));
      } catch (const Error& error) {
        log_warning(concat("rendezvous: a connection said nothing useful: ", error.what()));
        continue;
      }
      const bool genuine = peer_user(socket.get()) == ::getuid() &&
                           hello.nonce == records_[0].nonce && hello.rank > 0 &&
                           hello.rank < identity_.n_ranks && descriptors.size() == 1;
      if (!genuine) {
        log_warning("rendezvous: refused a connection that does not belong to this group");
        continue;
      }
      group->peers.peers[static_cast<std::size_t>(hello.rank)].liveness_fd =
          std::move(descriptors[0]);
      sockets[static_cast<std::size_t>(hello.rank)] = std::move(socket);
      --missing;
    }
    std::vector<int> all{file.get()};
    for (const Peer& peer : group->peers.peers) {
      all.push_back(peer.liveness_fd.get());
    }
    for (int rank = 1; rank < identity_.n_ranks; ++rank) {
      for (std::size_t begin = 0; begin < all.size(); begin += kDescriptorsPerMessage) {
        const auto end = std::min(all.size(), begin + kDescriptorsPerMessage);
        const std::vector<int> part(all.begin() + static_cast<std::ptrdiff_t>(begin),
                                    all.begin() + static_cast<std::ptrdiff_t>(end));
        send_message(sockets[static_cast<std::size_t>(rank)].get(), {records_[0].nonce, 0, 0},
                     part);
      }
    }
    return group;
  }

  // Other ranks: connect, hand over this process's descriptor, map what comes back.
  std::unique_ptr<SharedGroup> join() {
    // Rank 0 listened before it published the name, so a refusal is final.
    UniqueFd socket = connect_to(records_[0].socket_name);
    HORON_CHECK(socket, "rank 0 can not be reached (another container or network namespace?)");
    HORON_CHECK(peer_user(socket.get()) == ::getuid(), "rank 0 belongs to another user");
    const UniqueFd own_life = open_own_liveness();
    send_message(socket.get(), {records_[0].nonce, identity_.rank, 0}, {own_life.get()});
    std::vector<UniqueFd> descriptors;
    const std::size_t expected = static_cast<std::size_t>(identity_.n_ranks) + 1;
    while (descriptors.size() < expected) {
      const SocketMessage message = receive_message(socket.get(), &descriptors, deadline_);
      HORON_CHECK(message.nonce == records_[0].nonce, "rank 0 answered for another group");
    }
    check_shared_file(descriptors[0].get(), layout_.total_bytes());
    auto group = make_group(descriptors[0].get());
    HORON_CHECK(group->segment.head().nonce == records_[0].nonce,
                "the memory from rank 0 is not shared with it");
    for (std::size_t rank = 0; rank < group->peers.peers.size(); ++rank) {
      group->peers.peers[rank].liveness_fd = std::move(descriptors[rank + 1]);
    }
    return group;
  }

  std::unique_ptr<SharedGroup> make_group(int file) const {
    Peers peers;
    peers.rank = identity_.rank;
    peers.global_ranks = identity_.global_ranks;
    peers.peers.resize(static_cast<std::size_t>(identity_.n_ranks));
    for (std::size_t rank = 0; rank < peers.peers.size(); ++rank) {
      peers.peers[rank].pid = static_cast<pid_t>(records_[rank].pid);
    }
    return std::make_unique<SharedGroup>(
        SharedGroup{Segment(Mapping(file, layout_.total_bytes()), layout_), std::move(peers)});
  }

  // All ranks publish their outcome and read everybody's.
  bool agree(const std::string& failure) {
    if (!failure.empty()) {
      store_.add(prefix_ + "failures", 1);
      log_warning(concat("rank ", identity_.rank, " shares no memory with the group and counts as ",
                         "another host: ", failure));
    }
    store_.set(key("joined", identity_.rank), failure.empty() ? "yes" : "no: " + failure);
    bool all = failure.empty();
    for (int rank = 0; rank < identity_.n_ranks; ++rank) {
      all = get("joined", rank) == "yes" && all;
    }
    return all;
  }

  std::string key(const char* what, int rank) const { return concat(prefix_, what, '/', rank); }

  std::string get(const char* what, int rank) {
    try {
      return store_.get(key(what, rank), deadline_);
    } catch (const TimeoutError&) {
      throw TimeoutError(concat("Timed out waiting ", deadline_.timeout().count(), "ms for rank ",
                                rank, " to join the group of ", identity_.n_ranks,
                                " ranks. Is it running, and does it create the same groups in the ",
                                "same order?"));
    }
  }

  Store& store_;
  const GroupIdentity& identity_;
  const SegmentLayout layout_;
  const Options& options_;
  const Deadline deadline_;
  std::string prefix_;
  UniqueFd listener_;
  std::vector<Record> records_;
};

}  // namespace

std::unique_ptr<SharedGroup> rendezvous(Store& store, const GroupIdentity& identity,
                                        const Options& options, const Deadline& deadline) {
  return Rendezvous(store, identity, options, deadline).run();
}

}  // namespace horon
