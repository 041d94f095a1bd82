#include "shm/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <sstream>
#include <string_view>

#include "core/cpu_budget.h"
#include "core/error.h"
#include "core/header.h"
#include "core/log.h"
#include "core/random_nonce.h"
#include "core/rank_list.h"
#include "core/unix_socket.h"
#include "shm/boot_id.h"
#include "shm/liveness.h"
#include "shm/process_watch.h"
#include "watch/long_wait.h"
#include "watch/stall_schedule.h"

namespace horon {
namespace {

constexpr std::chrono::milliseconds kAcceptSlice{50};
// How often a rank that waits for another one's outcome looks whether that one is alive.
constexpr std::chrono::seconds kStoreSlice{1};
constexpr std::chrono::seconds kLongWaitSlice{5};  // between looks at a wait that lasts
// How an outcome begins that ends it for all, and what is left in the place of a record then.
constexpr std::string_view kDead = "dead: ";
// How long rank 0 has for saying whom it waits for, once a rank's time is over.
constexpr std::chrono::seconds kAnswerPatience{2};
// How long outcomes may take after the deadline: that of a rank that waits for rank 0's answer
// comes last.
constexpr std::chrono::seconds kOutcomePatience{3};
constexpr const char* kDiedMeanwhile = " died while the group was made";
// A member sends its greeting right after connecting.
constexpr std::chrono::milliseconds kHelloPatience{5000};
// How many processes with one rank are told so.
constexpr int kMostTwins = 8;
constexpr int kProtocolVersion = 8;
constexpr std::size_t kDescriptorsPerMessage = 200;

// Where a process is. Only processes of one user on one host can share memory.
struct HostIdentity {
  std::string boot_id;  // empty: unknown
  std::string user;
  std::string host_id;  // Options::host_id

  bool operator==(const HostIdentity&) const = default;
};

// Why a rank shares no memory with rank 0, although both may be on one machine. Empty where they
// surely are not, or are to count as two hosts.
std::string why_apart(int rank, const HostIdentity& its, const HostIdentity& of_rank_0) {
  if (its.host_id != of_rank_0.host_id) {
    return "";
  }
  if (its.boot_id.empty() != of_rank_0.boot_id.empty()) {
    return concat("rank ", its.boot_id.empty() ? rank : 0, " can not read ", kBootIdFile,
                  ", which tells on what machine it is. Is /proc mounted there?");
  }
  if (its.boot_id == of_rank_0.boot_id && its.user != of_rank_0.user) {
    return concat("rank ", rank, " runs as user ", its.user, " and rank 0 as user ", of_rank_0.user,
                  ", and only processes of one user share memory.");
  }
  return "";
}

// One line per field, so that a person can read a store.
struct Record {
  HostIdentity host;
  std::string settings;
  std::string socket_name;
  std::uint64_t nonce = 0;
  ProcessIdentity process;
  ArenaId arena_id{};
  std::uint64_t arena_bytes = 0;  // 0: no arena
  std::string cpus;               // a CpuBudget
  int n_ranks = 0;

  std::string encode() const {
    return concat(host.boot_id, '/', host.user, '/', host.host_id, '\n', settings, '\n',
                  socket_name, '\n', nonce, '\n', process.pid, '\n', process.pid_namespace, '\n',
                  process.start_time, '\n', arena_id[0], '\n', arena_id[1], '\n', arena_bytes, '\n',
                  cpus, '\n', n_ranks, '\n');
  }

  static Record decode(const std::string& text) {
    Record record;
    std::istringstream in(text);
    std::getline(in, record.host.boot_id, '/');
    std::getline(in, record.host.user, '/');
    std::getline(in, record.host.host_id);
    std::getline(in, record.settings);
    std::getline(in, record.socket_name);
    in >> record.nonce >> record.process.pid >> record.process.pid_namespace >>
        record.process.start_time >> record.arena_id[0] >> record.arena_id[1] >>
        record.arena_bytes >> record.cpus;
    HORON_CHECK(!in.fail(), "rendezvous: a rank's record in the store is damaged: '", text, "'");
    in >> record.n_ranks;  // which other versions leave out: their settings differ
    return record;
  }
};

HostIdentity own_host(const Options& options) {
  return {boot_id(), std::to_string(::getuid()), options.host_id};
}

class Rendezvous {
 public:
  Rendezvous(Store& store, const GroupIdentity& identity, const Options& options,
             const Deadline& deadline, const ArenaAccess& arenas)
      : store_(store),
        identity_(identity),
        layout_(identity.n_ranks, options),
        options_(options),
        deadline_(deadline),
        arenas_(arenas) {}

  std::unique_ptr<SharedGroup> run(Whereabouts* whereabouts) {
    begin();
    std::unique_ptr<SharedGroup> group;
    telling_of_errors([&] {
      exchange_records();
      if (!same_host()) {
        check_given_up();
        tell_apart();
        if (whereabouts != nullptr) {
          *whereabouts = this->whereabouts();
        }
        return;
      }
      watch_others();
      std::string failure;
      group = lead_or_join(&failure);
      if (!failure.empty()) {
        // Who has connected, and was not accepted yet, would wait for an answer until the deadline.
        listener_.reset();
      }
      if (!agree(failure, group.get())) {
        group.reset();
      }
    });
    return group;
  }

  std::int64_t call_roll() {
    begin();
    telling_of_errors([&] { exchange_records(); });
    return generation_;
  }

 private:
  void begin() {
    generation_ = store_.add(generation_key(identity_.rank), 1);
    prefix_ = concat("horon/", generation_, '/');
  }

  static std::string generation_key(int rank) { return concat("horon/generation/", rank); }

  template <typename Call>
  void telling_of_errors(const Call& call) {
    try {
      call();
    } catch (const PeerLostError& error) {  // maybe another rank's verdict, which all repeat
      give_up(error.what());
      throw;
    } catch (const UsageError& error) {
      give_up(concat(own_end(), error.what()));
      let_others_read();
      throw;
    } catch (const Error& error) {
      give_up(concat(own_end(), error.what()));
      throw;
    } catch (...) {  // a signal handler's
      give_up(concat(own_end(), "it was interrupted"));
      throw;
    }
  }

  std::unique_ptr<SharedGroup> lead_or_join(std::string* failure) {
    try {
      return identity_.rank == 0 ? lead() : join();
    } catch (const PeerLostError&) {
      throw;
    } catch (const TimeoutError&) {
      throw;  // another attempt, over Gloo, would wait for the same rank
    } catch (const Error& error) {
      *failure = error.what();
    }
    return nullptr;
  }

  std::string own_end() const { return concat("rank ", number(identity_.rank), " has given up: "); }

  // What messages call a rank.
  int number(int rank) const {
    const auto index = static_cast<std::size_t>(rank);
    return index < identity_.numbers.size() ? identity_.numbers[index] : rank;
  }

  // Who comes later must not wait for this rank. The first verdict is the one that is repeated.
  void give_up(const std::string& verdict) {
    try {
      store_.set(key("joined", identity_.rank), concat(kDead, verdict));
      if (store_.add(prefix_ + "verdicts", 1) == 1) {
        store_.set(prefix_ + "verdict", verdict);
      }
      store_.add(prefix_ + "failures", 1);
    } catch (const std::exception& error) {
      log_warning(concat("rank ", number(identity_.rank),
                         " could not tell the others that it gave up: ", error.what()));
    }
  }

  // The store may end with this process. What all find wrong themselves, they can only find there.
  void let_others_read() {
    const Deadline patience = Deadline::after(kAnswerPatience);
    try {
      for (int rank = 1; identity_.rank == 0 && rank < identity_.n_ranks; ++rank) {
        (void)store_.get(key("joined", rank), patience);  // left by who gives up
      }
    } catch (const TimeoutError&) {
      return;  // one that comes later reads what it can
    } catch (const std::exception& error) {
      log_warning(concat("rank ", number(0), " ended without the others: ", error.what()));
    }
  }

  // Who comes late learns from what the others have left that they wait no more, and why.
  void check_given_up() {
    if (store_.add(prefix_ + "verdicts", 0) > 0 && is_there(prefix_ + "verdict")) {
      throw PeerLostError(store_.get(prefix_ + "verdict", Deadline::after(kAnswerPatience)));
    }
  }

  void exchange_records() {
    Record own;
    own.host = own_host(options_);
    own.settings = concat("version=", kProtocolVersion, " words=", sizeof(RankWords),
                          " header=", sizeof(Header), ' ', options_.fingerprint());
    own.process = own_process();
    own.cpus = own_cpu_budget().encode();
    own.n_ranks = identity_.n_ranks;
    if (arenas_.own) {
      own.arena_id = arenas_.own->id();
      own.arena_bytes = arenas_.own->bytes();
    }
    if (identity_.rank == 0) {
      own.nonce = random_nonce();
      char name[40];
      std::snprintf(name, sizeof name, "horon-%016llx",
                    static_cast<unsigned long long>(random_nonce()));
      if (listen(name)) {  // before anybody can know the name
        own.socket_name = name;
      }
    }
    look_for_twin(own);
    store_.set(key("member", identity_.rank), own.encode());
    for (int rank = 0; rank < identity_.n_ranks; ++rank) {
      records_.push_back(rank == identity_.rank ? own : record_of(rank));
      check_like_rank_0(rank);  // at once: of a rank that another one does not know, none may come
    }
  }

  Record record_of(int rank) {
    const std::string text = get("member", rank);
    if (text.starts_with(kDead)) {
      throw UsageError(text.substr(kDead.size()));
    }
    return Record::decode(text);
  }

  // Two processes with one rank count as two generations of it, and both would wait: the first for
  // the rank that the second should be, the second for everybody.
  void look_for_twin(const Record& own) {
    const std::string own_key = concat("member/", identity_.rank);
    std::string before;
    std::optional<std::string> text;
    // A second process that was refused has left no record; a third one sees the first's.
    for (std::int64_t back = 1; !text && back < generation_ && back <= kMostTwins; ++back) {
      before = concat("horon/", generation_ - back, '/');
      text = if_there(before + own_key);
    }
    if (!text) {
      return;
    }
    Record its;
    try {
      its = Record::decode(*text);
    } catch (const Error&) {  // it had ended in an error, or was of another version
      return;
    }
    if (its.process == own.process || its.host != own.host ||
        !ProcessWatch(its.process).is_alive()) {
      return;
    }
    const std::string both =
        concat(name_ranks({identity_.rank}, identity_.numbers, identity_.global_ranks),
               " has come twice to the group of ", identity_.n_ranks, " ranks: as process ",
               its.process.pid, ", which is alive, and as ", own.process.pid,
               ". Give each process a RANK of its own.");
    std::vector<int> missing;
    for (int rank = 0; rank < identity_.n_ranks; ++rank) {
      const std::optional<std::string> member = if_there(concat(before, "member/", rank));
      if (!member) {
        missing.push_back(rank);
      } else if (member->starts_with(kDead)) {
        throw UsageError(both);  // as was the one before
      }
    }
    if (missing.empty() || is_there(concat(before, "joined/", identity_.rank))) {
      // The first may have had its group, and be done with it.
      log_warning(both);
      twin_ = ' ' + both;
      return;
    }
    for (const int rank : missing) {  // whom the others would wait for
      store_.set(concat(before, "member/", rank), concat(kDead, both));
    }
    throw UsageError(both);
  }

  void check_like_rank_0(int rank) const {
    const Record& its = records_[static_cast<std::size_t>(rank)];
    if (its.settings != records_[0].settings) {
      throw UsageError(concat("the ranks of a group have different settings or builds: rank 0 ",
                              records_[0].settings, "; rank ", rank, ' ', its.settings,
                              ". Give all ranks the same HORON_ variables and horon version."));
    }
    if (its.n_ranks != records_[0].n_ranks) {
      throw UsageError(concat("the ranks of a group disagree about its size: rank 0 has ",
                              records_[0].n_ranks, " ranks, rank ", rank, " has ", its.n_ranks,
                              ". Give all ranks the same WORLD_SIZE, or the same list of ranks."));
    }
  }

  // That the ranks of these records can keep busy together.
  template <typename IsCounted>
  double cpus_of(const IsCounted& is_counted) const {
    std::vector<CpuBudget> budgets;
    for (const Record& record : records_) {
      if (is_counted(record)) {
        budgets.push_back(CpuBudget::decode(record.cpus));
      }
    }
    return common_cpus(budgets);
  }

  // Whether there are so many cores for each rank, also of those that share no memory with these.
  bool has_cores(int of_each) const {
    const double own = cpus_of([](const Record&) { return true; });
    return of_each * identity_.n_ranks <= own &&
           (identity_.n_on_machine <= identity_.n_ranks ||
            of_each * identity_.n_on_machine <= identity_.cpus_of_machine);
  }

  bool is_crowded() const { return !has_cores(1); }

  bool claims() const {
    return options_.claiming == "auto" ? is_crowded() : options_.claiming == "on";
  }

  // A rank 0 without sockets still takes part in what all ranks have to agree on.
  bool listen(const std::string& socket_name) {
    if (identity_.n_ranks == 1) {
      return false;
    }
    try {
      listener_ = listen_on(socket_name);
    } catch (const Error& error) {
      why_deaf_ = error.what();
    }
    return static_cast<bool>(listener_);
  }

  bool same_host() const {
    for (const Record& record : records_) {
      if (record.host != records_[0].host) {
        return false;
      }
    }
    return true;
  }

  Whereabouts whereabouts() const {
    Whereabouts where;
    const HostIdentity& own = records_[static_cast<std::size_t>(identity_.rank)].host;
    where.n_on_machine = 0;
    for (const Record& record : records_) {
      int host = 0;  // the first rank that is there
      while (records_[static_cast<std::size_t>(host)].host != record.host) {
        ++host;
      }
      where.hosts.push_back(host);
      where.n_on_machine += record.host.boot_id == own.boot_id ? 1 : 0;
    }
    where.cpus_of_machine =
        cpus_of([&](const Record& record) { return record.host.boot_id == own.boot_id; });
    return where;
  }

  // Who set up several hosts knows it; who set up one may not know that it counts as several.
  void tell_apart() const {
    for (int rank = 1; identity_.rank == 0 && rank < identity_.n_ranks; ++rank) {
      const std::string why =
          why_apart(rank, records_[static_cast<std::size_t>(rank)].host, records_[0].host);
      if (!why.empty()) {
        log_warning_once("apart", concat("the group of ", identity_.n_ranks,
                                         " ranks counts as one of ", "several hosts: ", why));
        return;
      }
    }
  }

  // Rank 0: makes the segment, collects everybody's descriptor, hands out all of them.
  std::unique_ptr<SharedGroup> lead() {
    HORON_CHECK(why_deaf_.empty(), why_deaf_);
    const UniqueFd file = create_shared_file(layout_.total_bytes(), layout_.reserved_bytes());
    auto group = make_group(file.get());
    group->segment.head().nonce = records_[0].nonce;
    group->peers.peers[0].liveness_fd = open_own_liveness();
    std::vector<UniqueFd> sockets(static_cast<std::size_t>(identity_.n_ranks));
    std::vector<UniqueFd> arena_files(static_cast<std::size_t>(identity_.n_ranks));
    for (int missing = identity_.n_ranks - 1; missing > 0;) {
      UniqueFd socket = accept_until(listener_.get(), Deadline::after(kAcceptSlice));
      if (!socket) {
        check_connecting(sockets);
        check_others(group.get());
        store_.look_around();
        continue;
      }
      std::vector<UniqueFd> descriptors;
      SocketMessage hello;
      try {
        hello = receive_message(socket.get(), &descriptors, hello_deadline());
      } catch (const Error& error) {
        log_warning(concat("rendezvous: a connection said nothing useful: ", error.what()));
        continue;
      }
      const bool genuine = peer_credentials(socket.get()).uid == ::getuid() &&
                           hello.nonce == records_[0].nonce && hello.rank > 0 &&
                           hello.rank < identity_.n_ranks &&
                           descriptors.size() == (has_arena(hello.rank) ? 2U : 1U);
      if (!genuine) {
        log_warning("rendezvous: refused a connection that does not belong to this group");
        continue;
      }
      group->peers.peers[static_cast<std::size_t>(hello.rank)].liveness_fd =
          std::move(descriptors[0]);
      if (has_arena(hello.rank)) {
        arena_files[static_cast<std::size_t>(hello.rank)] = std::move(descriptors[1]);
      }
      sockets[static_cast<std::size_t>(hello.rank)] = std::move(socket);
      --missing;
    }
    std::vector<int> all{file.get()};
    for (const Peer& peer : group->peers.peers) {
      all.push_back(peer.liveness_fd.get());
    }
    if (has_arena(0)) {
      all.push_back(arenas_.own->file());
    }
    for (const UniqueFd& file : arena_files) {
      if (file) {
        all.push_back(file.get());
      }
    }
    for (int rank = 1; rank < identity_.n_ranks; ++rank) {
      for (std::size_t begin = 0; begin < all.size(); begin += kDescriptorsPerMessage) {
        const auto end = std::min(all.size(), begin + kDescriptorsPerMessage);
        const std::vector<int> part(all.begin() + static_cast<std::ptrdiff_t>(begin),
                                    all.begin() + static_cast<std::ptrdiff_t>(end));
        send_message(sockets[static_cast<std::size_t>(rank)].get(), {records_[0].nonce, 0, 0}, part,
                     deadline_);
      }
    }
    group->arenas = map_arenas(arena_files);
    return group;
  }

  // Rank 0: throws when it is no use to wait for the ranks without a socket.
  void check_connecting(const std::vector<UniqueFd>& sockets) {
    const bool has_failed = store_.add(prefix_ + "failures", 0) > 0;
    if (has_failed) {
      check_given_up();
      HORON_CHECK(store_.add(prefix_ + "expired", 0) > 0, "a rank could not connect");
    }
    if (!has_failed && !deadline_.has_passed()) {
      return;
    }
    std::vector<int> missing;
    for (int rank = 1; rank < identity_.n_ranks; ++rank) {
      if (!sockets[static_cast<std::size_t>(rank)]) {
        missing.push_back(rank);
      }
    }
    throw TimeoutError(late_text(missing));
  }

  // A rank that stopped before its greeting must not keep rank 0 from answering in time; one that
  // connected before rank 0 came late has left its greeting long ago.
  Deadline hello_deadline() const {
    return Deadline::after(std::clamp(time_left(), kAcceptSlice, kHelloPatience));
  }

  // Other ranks: connect, hand over this process's descriptor, map what comes back.
  std::unique_ptr<SharedGroup> join() {
    HORON_CHECK(!records_[0].socket_name.empty(), "rank ", number(0), " has no socket");
    // Rank 0 listened before it published the name, so a refusal is final.
    UniqueFd socket = connect_to(records_[0].socket_name);
    if (!socket) {
      check_given_up();  // those who have given up may have ended since
      check_others(nullptr);
    }
    HORON_CHECK(socket, "rank ", number(0),
                " can not be reached (another container or network namespace?)");
    HORON_CHECK(peer_credentials(socket.get()).uid == ::getuid(), "rank ", number(0),
                " belongs to another user");
    const UniqueFd own_life = open_own_liveness();
    std::vector<int> own_descriptors{own_life.get()};
    if (arenas_.own) {
      own_descriptors.push_back(arenas_.own->file());
    }
    send_message(socket.get(), {records_[0].nonce, identity_.rank, 0}, own_descriptors, deadline_);
    std::vector<UniqueFd> descriptors;
    std::size_t expected = static_cast<std::size_t>(identity_.n_ranks) + 1;
    for (int rank = 0; rank < identity_.n_ranks; ++rank) {
      expected += has_arena(rank) ? 1 : 0;
    }
    while (descriptors.size() < expected) {
      await_message(socket.get());
      const SocketMessage message =
          receive_message(socket.get(), &descriptors, Deadline::after(kAcceptSlice));
      HORON_CHECK(message.nonce == records_[0].nonce, "rank ", number(0),
                  " answered for another group");
    }
    check_shared_file(descriptors[0].get(), layout_.total_bytes());
    auto group = make_group(descriptors[0].get());
    HORON_CHECK(group->segment.head().nonce == records_[0].nonce, "the memory from rank ",
                number(0), " is not shared with it");
    for (std::size_t rank = 0; rank < group->peers.peers.size(); ++rank) {
      group->peers.peers[rank].liveness_fd = std::move(descriptors[rank + 1]);
    }
    std::vector<UniqueFd> arena_files(group->peers.peers.size());
    auto next = group->peers.peers.size() + 1;
    for (std::size_t rank = 0; rank < arena_files.size(); ++rank) {
      if (has_arena(static_cast<int>(rank))) {
        arena_files[rank] = std::move(descriptors[next++]);
      }
    }
    group->arenas = map_arenas(arena_files);
    return group;
  }

  // From rank 0. Whose time is over lets rank 0 say whom it waits for, and blames rank 0 only if it
  // does not answer.
  void await_message(int socket) {
    while (!has_message(socket, Deadline::after(kAcceptSlice))) {
      if (deadline_.has_passed()) {
        await_answer(socket);
        return;
      }
      store_.look_around();
    }
  }

  void await_answer(int socket) {
    store_.add(prefix_ + "expired", 1);
    store_.add(prefix_ + "failures", 1);  // which rank 0 looks at
    const Deadline patience = Deadline::after(kAnswerPatience);
    while (!has_message(socket, Deadline::after(kAcceptSlice))) {
      check_given_up();
      if (patience.has_passed()) {
        throw TimeoutError(late_text({0}));
      }
      store_.look_around();
    }
  }

  void watch_others() {
    watches_.resize(records_.size());
    for (std::size_t rank = 0; rank < records_.size(); ++rank) {
      if (static_cast<int>(rank) != identity_.rank) {
        watches_[rank] = ProcessWatch(records_[rank].process);
      }
    }
  }

  // Descriptors that a rank of this group has given tell more than its record: across namespaces.
  bool has_died(int rank, const SharedGroup* group) const {
    const auto index = static_cast<std::size_t>(rank);
    if (watches_[index].has_ended()) {
      return true;
    }
    const int liveness = group == nullptr ? -1 : group->peers.peers[index].liveness_fd.get();
    return liveness >= 0 && has_ended(liveness);
  }

  // Somebody who died would be waited for until the deadline.
  void check_others(const SharedGroup* group) const {
    for (int rank = 0; rank < identity_.n_ranks; ++rank) {
      if (rank != identity_.rank && has_died(rank, group)) {
        throw PeerLostError(concat(describe(rank), kDiedMeanwhile));
      }
    }
  }

  std::string describe(int rank) const { return own_peers().describe(rank); }

  // For ranks whose records are there.
  std::string late_text(const std::vector<int>& missing) const {
    std::string names;
    for (const int rank : missing) {
      names += (names.empty() ? "" : ", ") + describe(rank);
    }
    return concat("Timed out waiting ", deadline_.timeout().count(), "ms for ", names,
                  " to join the group of ", identity_.n_ranks,
                  " ranks after a first sign of life. Stopped, or short of CPU time?");
  }

  // What the records alone tell.
  Peers own_peers() const {
    Peers peers;
    peers.rank = identity_.rank;
    peers.global_ranks = identity_.global_ranks;
    peers.numbers = identity_.numbers;
    peers.peers.resize(static_cast<std::size_t>(identity_.n_ranks));
    for (std::size_t rank = 0; rank < peers.peers.size(); ++rank) {
      peers.peers[rank].pid = records_[rank].process.pid;
    }
    return peers;
  }

  bool has_arena(int rank) const {
    return records_[static_cast<std::size_t>(rank)].arena_bytes > 0;
  }

  // A failure costs speed, not the group.
  GroupArenas map_arenas(const std::vector<UniqueFd>& files) const {
    if (!arenas_.mapped) {
      return {};
    }
    std::vector<GroupArenas::View> views(files.size());
    try {
      for (std::size_t rank = 0; rank < files.size(); ++rank) {
        const Record& record = records_[rank];
        if (record.arena_bytes == 0) {
          continue;
        }
        if (arenas_.own && record.arena_id == arenas_.own->id()) {
          views[rank] = {arenas_.own, arenas_.own->data(), arenas_.own->bytes()};
        } else {
          auto mapped = arenas_.mapped->map(record.arena_id, files[rank].get(), record.arena_bytes);
          views[rank] = {mapped, mapped->data(), mapped->bytes()};
        }
      }
    } catch (const Error& error) {
      log_warning_once(error.what(),
                       concat("rank ", number(identity_.rank),
                              " can not see the tensors that its peers have in ",
                              "their arenas, which are therefore copied: ", error.what()));
      return {};
    }
    return GroupArenas(arenas_.own, std::move(views));
  }

  std::unique_ptr<SharedGroup> make_group(int file) const {
    Peers peers = own_peers();
    peers.is_crowded = is_crowded();
    peers.claims = claims();
    peers.may_move = may_move_;
    peers.linger_time = peers.is_crowded ? std::chrono::microseconds(0) : linger_time_;
    peers.has_spare_cores = has_cores(2);
    return std::make_unique<SharedGroup>(
        SharedGroup{Segment(Mapping(file, layout_.total_bytes()), layout_), std::move(peers), {}});
  }

  // All ranks publish their outcome and read everybody's. Without the group, only the store tells.
  bool agree(const std::string& failure, const SharedGroup* group) {
    store_.set(key("joined", identity_.rank), failure.empty() ? "yes" : "no: " + failure);
    if (!failure.empty()) {
      store_.add(prefix_ + "failures", 1);
    }
    const Deadline until = outcome_deadline();
    bool all = failure.empty();
    std::vector<int> missing;
    for (int rank = 0; rank < identity_.n_ranks; ++rank) {
      if (rank == identity_.rank) {
        continue;
      }
      const std::optional<std::string> outcome = await_outcome(rank, group, until);
      if (!outcome) {
        missing.push_back(rank);
        continue;
      }
      if (outcome->starts_with(kDead)) {
        throw PeerLostError(outcome->substr(kDead.size()));
      }
      all = outcome == "yes" && all;
    }
    tell(failure);
    if (!missing.empty()) {
      throw TimeoutError(late_text(missing));
    }
    return all;
  }

  Deadline outcome_deadline() const {
    return Deadline::after(std::max(time_left(), std::chrono::milliseconds(0)) + kOutcomePatience);
  }

  // Negative after the deadline.
  std::chrono::milliseconds time_left() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(deadline_.remaining());
  }

  // Why this rank shares no memory, if it does not. Not where the group fails for another reason.
  void tell(const std::string& failure) const {
    if (!failure.empty()) {
      log_warning_once(failure, concat("rank ", number(identity_.rank),
                                       " shares no memory with the group and counts as ",
                                       "another host: ", failure));
    }
  }

  // Nothing if it has not come in time. Throws for a rank that has died without it, and when
  // somebody gives up meanwhile.
  std::optional<std::string> await_outcome(int rank, const SharedGroup* group,
                                           const Deadline& until) {
    while (true) {
      const Deadline slice = Deadline::after(kStoreSlice);
      try {
        return store_.get(key("joined", rank), slice.at() < until.at() ? slice : until);
      } catch (const TimeoutError&) {
        check_given_up();
        if (until.has_passed()) {
          return std::nullopt;
        }
        store_.look_around();
        if (has_died(rank, group) && !is_there(key("joined", rank))) {
          throw PeerLostError(concat(describe(rank), kDiedMeanwhile));
        }
      }
    }
  }

  bool is_there(const std::string& key) { return if_there(key).has_value(); }

  std::optional<std::string> if_there(const std::string& key) {
    try {
      return store_.get(key, Deadline::after(std::chrono::milliseconds(100)));
    } catch (const TimeoutError&) {
      return std::nullopt;
    }
  }

  std::string key(const char* what, int rank) const { return concat(prefix_, what, '/', rank); }

  std::string get(const char* what, int rank) {
    LongWait wait;
    wait.begin();
    while (!deadline_.has_passed()) {
      try {
        std::string value = store_.get(key(what, rank), until_next_look());
        wait.go_on();
        return value;
      } catch (const TimeoutError&) {
        wait.look(deadline_,
                  [&](bool is_report) { return what_is_awaited(what, rank, is_report); });
      }
    }
    try {
      return store_.get(key(what, rank), deadline_);
    } catch (const TimeoutError&) {
      const std::string whom =
          name_ranks(all_without(what, rank), identity_.numbers, identity_.global_ranks);
      throw TimeoutError(concat("Timed out waiting ", deadline_.timeout().count(), "ms for ", whom,
                                " to join the group of ", identity_.n_ranks,
                                " ranks. Is it running, and does it create the same groups in the ",
                                "same order?", twin_.empty() ? often_text() : twin_));
    }
  }

  // Long enough for the store to look around in between, and so that a report can come before time
  // is up.
  Deadline until_next_look() const {
    const std::chrono::milliseconds left = time_left();
    return left > kReportBeforeTheEnd ? Deadline::after(std::min<std::chrono::milliseconds>(
                                            kLongWaitSlice, left - kReportBeforeTheEnd))
                                      : deadline_;
  }

  // Ranks are waited for in order: those below `rank` have come.
  Waiting what_is_awaited(const char* what, int rank, bool is_report) {
    Waiting waiting;
    waiting.reports = is_report && (rank == 0 || identity_.rank == 0);
    for (int lower = 1; waiting.reports && lower < identity_.rank; ++lower) {
      waiting.reports = !is_there(key(what, lower));
    }
    waiting.operation = concat(
        name_ranks({identity_.rank}, identity_.numbers, identity_.global_ranks),
        ", making a group of ", identity_.n_ranks, " ranks (init_process_group, new_group),");
    for (const int other : waiting.reports ? all_without(what, rank) : std::vector<int>{rank}) {
      waiting.late.push_back(
          {name_ranks({other}, identity_.numbers, identity_.global_ranks), 0, ""});
    }
    return waiting;
  }

  // Of ranks that have come more often than this one, on whatever host.
  std::string often_text() {
    std::vector<int> often;
    const Deadline patience = Deadline::after(kAnswerPatience);
    for (int rank = 0; rank < identity_.n_ranks && !patience.has_passed(); ++rank) {
      if (store_.add(generation_key(rank), 0) > generation_) {
        often.push_back(rank);
      }
    }
    return often.empty()
               ? ""
               : concat(" Another process has come as ",
                        name_ranks(often, identity_.numbers, identity_.global_ranks),
                        ", too: was it started again, or do two processes have one RANK?");
  }

  // The ranks from `first` on that have not left this in the store. The first may be waiting for
  // another one, in the store's own start, and be blamed in its stead.
  std::vector<int> all_without(const char* what, int first) {
    const Deadline patience = Deadline::after(kAnswerPatience);
    std::vector<int> missing{first};
    for (int rank = first + 1; rank < identity_.n_ranks && !patience.has_passed(); ++rank) {
      if (rank != identity_.rank && !is_there(key(what, rank))) {
        missing.push_back(rank);
      }
    }
    return missing;
  }

  Store& store_;
  const GroupIdentity& identity_;
  const SegmentLayout layout_;
  const Options& options_;
  const Deadline deadline_;
  const ArenaAccess& arenas_;
  const bool may_move_ = may_move_threads_from_environment();
  const std::chrono::microseconds linger_time_ = linger_time_from_environment();
  std::int64_t generation_ = 0;
  std::string prefix_;
  std::string twin_;  // what a timeout has to say of another process with this rank
  UniqueFd listener_;
  std::string why_deaf_;               // why there is no listener on rank 0
  std::vector<Record> records_;        // by rank
  std::vector<ProcessWatch> watches_;  // by rank; of those of this host
};

}  // namespace

std::unique_ptr<SharedGroup> rendezvous(Store& store, const GroupIdentity& identity,
                                        const Options& options, const Deadline& deadline,
                                        const ArenaAccess& arenas, Whereabouts* whereabouts) {
  return Rendezvous(store, identity, options, deadline, arenas).run(whereabouts);
}

std::int64_t call_roll(Store& store, const GroupIdentity& identity, const Options& options,
                       const Deadline& deadline) {
  return Rendezvous(store, identity, options, deadline, {}).call_roll();
}

}  // namespace horon
