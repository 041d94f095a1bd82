#include "cross/coordinator_meeting.h"
#include "cross/tcp_control_channel.h"

#include <poll.h>

#include <filesystem>
#include <fstream>
#include <latch>
#include <sstream>

#include "catch.h"
#include "in_child.h"
#include "net/tcp_socket.h"
#include "rank_threads.h"
#include "thread_activity.h"

using namespace horon;           // NOLINT
using namespace horon::testing;  // NOLINT

namespace {

using Bytes = ControlChannel::Bytes;
using Sleeper = ControlChannel::Sleeper;

std::unique_ptr<TcpControlChannel> meet(Store& store, int rank, int n_ranks) {
  return std::make_unique<TcpControlChannel>(
      rank, n_ranks, meet_coordinator(store, rank, n_ranks, "lo", patient_context()));
}

// Until `done`, looking whenever something happens.
void attend_until(ControlChannel& channel, const std::function<bool()>& done) {
  const Deadline deadline = patient();
  while (true) {
    const std::uint32_t seen = channel.events();
    if (done()) {
      return;
    }
    expect(!deadline.has_passed(), "nothing happens");
    channel.sleep(Sleeper::kForeground, seen, std::chrono::seconds(1));
  }
}

Bytes receive_one(ControlChannel& channel, int* source) {
  Bytes bytes;
  attend_until(channel, [&] { return channel.receive(source, &bytes); });
  return bytes;
}

Bytes pattern_of(std::size_t size, int seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>(i * 31 + static_cast<std::size_t>(seed));
  }
  return bytes;
}

std::vector<long> threads_named(const std::string& wanted) {
  std::vector<long> ids;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string thread_name;
    std::ifstream(task.path() / "comm") >> thread_name;
    if (thread_name == wanted) {
      ids.push_back(std::stol(task.path().filename()));
    }
  }
  return ids;
}

}  // namespace

TEST_CASE("tcp control: messages of all sizes, in order, to and from every rank") {
  const int n = GENERATE(1, 2, 3, 5);
  const std::vector<std::size_t> sizes = {0, 1, 7, 8, 4096, 65'537, 3'000'001, 0, 12};
  MemoryStore store;
  require_no_errors(run_ranks(n, [&](int rank) {
    const auto channel = meet(store, rank, n);
    if (rank == 0) {
      std::vector<std::size_t> next(static_cast<std::size_t>(n));
      for (std::size_t i = 0; i < sizes.size() * static_cast<std::size_t>(n - 1); ++i) {
        int source = -1;
        const Bytes bytes = receive_one(*channel, &source);
        const std::size_t at = next.at(static_cast<std::size_t>(source))++;
        expect(bytes == pattern_of(sizes[at], source), "a damaged message, or another order");
        channel->send(source, bytes, at % 2 == 0);
        channel->flush();
      }
      attend_until(*channel, [&] { return channel->flush(); });
    } else {
      for (const std::size_t size : sizes) {
        channel->send(0, pattern_of(size, rank), size % 2 == 0);
      }
      attend_until(*channel, [&] { return channel->flush(); });
      for (const std::size_t size : sizes) {
        int source = -1;
        expect(receive_one(*channel, &source) == pattern_of(size, rank), "a damaged answer");
        expect(source == 0, "not from rank 0");
      }
    }
    expect(channel->failure().empty(), channel->failure());
    channel->depart();
  }));
}

TEST_CASE("tcp control: more than the sockets hold waits, and nothing is lost") {
  MemoryStore store;
  std::latch is_full(2);
  require_no_errors(run_ranks(2, [&](int rank) {
    const auto channel = meet(store, rank, 2);
    constexpr int kMessages = 40;
    constexpr std::size_t kBytes = 1'000'000;
    if (rank == 1) {
      for (int i = 0; i < kMessages; ++i) {
        channel->send(0, pattern_of(kBytes, i), true);
      }
      channel->flush();
      is_full.arrive_and_wait();
      attend_until(*channel, [&] { return channel->flush(); });
    } else {
      is_full.arrive_and_wait();
      for (int i = 0; i < kMessages; ++i) {
        int source = -1;
        expect(receive_one(*channel, &source) == pattern_of(kBytes, i), "message ", i);
      }
    }
    channel->depart();
  }));
}

TEST_CASE("tcp control: a poison reaches all ranks, with the first reason") {
  const int culprit = GENERATE(0, 2);
  MemoryStore store;
  std::latch all_know(3);
  require_no_errors(run_ranks(3, [&](int rank) {
    const auto channel = meet(store, rank, 3);
    if (rank == culprit) {
      channel->poison("enough");
      channel->poison("too late");
    }
    attend_until(*channel, [&] { return channel->is_poisoned(); });
    expect(channel->failure() == "enough", channel->failure());
    all_know.arrive_and_wait();
  }));
}

TEST_CASE("tcp control: who goes without a goodbye is dead, and named to all") {
  const int victim = GENERATE(0, 1);
  MemoryStore store;
  std::latch all_know(2);
  require_no_errors(run_ranks(3, [&](int rank) {
    auto channel = meet(store, rank, 3);
    if (rank == victim) {
      channel.reset();
      return;
    }
    attend_until(*channel, [&] { return channel->is_poisoned(); });
    expect(contains(channel->failure(), concat("rank ", victim, " (pid ", ::getpid(), " on ")),
           channel->failure());
    expect(contains(channel->failure(), "died or can not be reached"), channel->failure());
    if (rank == 0 || victim == 0) {  // others have no connection to it
      expect(!channel->has_departed(victim), "it said goodbye");
    }
    all_know.arrive_and_wait();
  }));
}

TEST_CASE("tcp control: a goodbye is no failure, and what was said before it arrives") {
  MemoryStore store;
  require_no_errors(run_ranks(2, [&](int rank) {
    auto channel = meet(store, rank, 2);
    if (rank == 0) {
      channel->send(1, pattern_of(300'000, 5), false);
      channel->depart();
      channel.reset();
      return;
    }
    attend_until(*channel, [&] { return channel->has_departed(0); });
    int source = -1;
    expect(receive_one(*channel, &source) == pattern_of(300'000, 5), "a damaged message");
    channel->send(0, pattern_of(10, 1), true);  // nobody is there
    channel->flush();
    expect(channel->failure().empty(), channel->failure());
    channel->depart();
  }));
}

TEST_CASE("tcp control: a message that is not urgent wakes no background thread without needs") {
  MemoryStore store;
  require_no_errors(run_ranks(2, [&](int rank) {
    const auto channel = meet(store, rank, 2);
    if (rank == 1) {
      channel->send(0, {}, false);
      channel->flush();
      int source = -1;
      receive_one(*channel, &source);  // rank 0 has seen it
      channel->send(0, {}, true);
      channel->flush();
      receive_one(*channel, &source);
    } else {
      channel->leave_to_background(true);
      int source = -1;
      receive_one(*channel, &source);  // it came all the same
      channel->leave_to_background(true);
      const std::uint32_t seen = channel->events();
      channel->send(1, {}, true);
      channel->flush();
      const auto started = Clock::now();
      channel->sleep(Sleeper::kBackground, seen, std::chrono::seconds(60));
      expect(Clock::now() - started < std::chrono::seconds(30), "an urgent message did not wake");
      channel->send(1, {}, true);
      channel->flush();
    }
    channel->depart();
  }));
}

TEST_CASE("tcp control: strangers are refused") {
  MemoryStore store;
  std::uint16_t port = 0;
  require_no_errors(run_ranks(2, [&](int rank) {
    if (rank == 1) {
      // What a scanner of ports, another protocol and another job say.
      const std::string place = store.get("horon/meeting/1/coordinator", patient());
      std::uint64_t nonce = 0;
      std::istringstream(place) >> nonce >> port;
      UniqueFd silent = begin_connect("127.0.0.1", port);
      silent.reset();
      UniqueFd talker = begin_connect("127.0.0.1", port);
      wait_for_socket(talker.get(), POLLOUT, patient_context());
      const std::string greeting(200, 'x');
      send_all(talker.get(), greeting.data(), greeting.size(), patient_context());
      char answer = 0;
      expect(error_of([&] { receive_all(talker.get(), &answer, 1, patient_context()); }) != nullptr,
             "it was answered");
    }
    const auto channel = meet(store, rank, 2);
    if (rank == 1) {
      channel->send(0, pattern_of(5, 1), true);
      channel->flush();
    } else {
      int source = -1;
      expect(receive_one(*channel, &source) == pattern_of(5, 1), "a damaged message");
    }
    channel->depart();
  }));
}

TEST_CASE("tcp control: a rank that never comes is named") {
  MemoryStore store;
  const auto error = error_of([&] { meet_coordinator(store, 0, 3, "lo", {soon(), nullptr}); });
  REQUIRE(threw<TimeoutError>(error));
  CHECK(contains(text_of(error), "a connection from ranks 1 and 2"));

  store.set("horon/meeting/1/coordinator", "1 1 127.0.0.1");  // nobody listens on port 1
  const auto alone = error_of([&] { meet_coordinator(store, 1, 3, "lo", {soon(), nullptr}); });
  REQUIRE(threw<TimeoutError>(alone));
  CHECK(contains(text_of(alone), "a connection to rank 0 (127.0.0.1 port 1): no address answered"));
}

TEST_CASE("tcp control: a rank that gave up before it was answered is not counted") {
  MemoryStore store;
  require_no_errors(run_ranks(2, [&](int rank) {
    if (rank == 0) {
      const auto peers = meet_coordinator(store, 0, 2, "lo", patient_context());
      char byte = 0;
      receive_all(peers.at(0).socket.get(), &byte, sizeof byte, patient_context());
      expect(byte == 7, "another connection than the one that is used");
      return;
    }
    // The first attempt greets as rank 1 does, and is gone before the answer comes.
    const std::string place = store.get("horon/meeting/1/coordinator", patient());
    std::istringstream in(place);
    std::uint64_t nonce = 0;
    std::uint16_t port = 0;
    in >> nonce >> port;
    {
      const UniqueFd hasty = begin_connect("127.0.0.1", port);
      struct {
        std::uint64_t magic = 0x32306c74636e7268;
        std::uint64_t nonce = 0;
        std::int64_t pid = 1;
        std::int32_t rank = 1;
        char host[64] = "gone";
        std::int32_t reserved = 0;
      } greeting;
      greeting.nonce = nonce;
      expect(wait_for_socket(hasty.get(), POLLOUT, patient_context()), "no connection");
      send_all(hasty.get(), &greeting, sizeof greeting, patient_context());
    }
    const auto peers = meet_coordinator(store, 1, 2, "lo", patient_context());
    const char byte = 7;
    send_all(peers.at(0).socket.get(), &byte, sizeof byte, patient_context());
  }));
}

TEST_CASE("tcp control: an interface that does not exist") {
  const auto error = error_of([] { own_addresses("lo0x,eth77"); });
  REQUIRE(threw<UsageError>(error));
  CHECK(contains(text_of(error), "'lo0x,eth77'"));
  CHECK(contains(text_of(error), "lo"));
  MemoryStore store;
  const Errors errors =
      run_ranks(2, [&](int rank) { meet_coordinator(store, rank, 2, "eth77", patient_context()); });
  require_all_threw<UsageError>(errors);
  CHECK(contains(text_of(errors[1]), "rank 0 can not be reached: no address on"));
  CHECK(own_addresses("lo").front() == "127.0.0.1");
  CHECK(!own_addresses("").empty());
}

TEST_CASE("tcp control: again and again, through one store") {
  MemoryStore store;
  require_no_errors(run_ranks(3, [&](int rank) {
    for (int i = 0; i < 30; ++i) {
      const auto channel = meet(store, rank, 3);
      channel->depart();
    }
  }));
}

TEST_CASE("tcp control: idle, its threads sleep") {
  MemoryStore store;
  std::vector<std::unique_ptr<TcpControlChannel>> channels(2);
  require_no_errors(run_ranks(
      2, [&](int rank) { channels[static_cast<std::size_t>(rank)] = meet(store, rank, 2); }));
  std::vector<long> readers;
  for (const Deadline deadline = patient(); readers.size() != 2 && !deadline.has_passed();) {
    readers = threads_named("horon-control");  // a thread names itself
  }
  REQUIRE(readers.size() == 2);
  for (const long reader : readers) {
    CHECK(comes_to_rest(reader));
  }
  for (const auto& channel : channels) {
    channel->depart();
  }
}

TEST_CASE("tcp control: a forked child does not keep a dead rank's connection open") {
  if (kHasThreadSanitizer) {
    return;  // it can not follow a fork with threads
  }
  MemoryStore store;
  std::latch has_noticed(2);
  require_no_errors(run_ranks(2, [&](int rank) {
    auto channel = meet(store, rank, 2);
    if (rank == 0) {
      attend_until(*channel, [&] { return channel->is_poisoned(); });
      has_noticed.arrive_and_wait();
      return;
    }
    int pipe_ends[2];
    expect(::pipe(pipe_ends) == 0, "pipe");
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(300);
      char byte = 0;
      (void)!::read(pipe_ends[0], &byte, 1);  // lives on until the parent is done
      ::_exit(0);
    }
    channel.reset();  // dies, while the child lives
    has_noticed.arrive_and_wait();
    (void)!::write(pipe_ends[1], "x", 1);
    ::close(pipe_ends[0]);
    ::close(pipe_ends[1]);
    int status = 0;
    ::waitpid(child, &status, 0);
  }));
}
