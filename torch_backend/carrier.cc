#include "carrier.h"

#include <algorithm>
#include <numeric>

#include "ask_again.h"
#include "core/error.h"
#include "core/log.h"
#include "core/options.h"
#include "cross/full_meeting.h"
#include "cross/tcp_byte_transport.h"
#include "own_post.h"
#include "store_adapter.h"

namespace horon::torch_backend {
namespace {

// All have just met.
constexpr std::chrono::milliseconds kMeetingPatience{30'000};
constexpr std::chrono::seconds kLookAtFailures{1};
constexpr const char* kFailures = "failures";
// From when a rank that could not connect has closed its connections until it has told so.
constexpr std::chrono::seconds kTellingPatience{2};

// Note [Who does not connect]
// A rank that can not connect leaves a count, and goes on over Gloo with all others. One that does
// not go on at all (a peer has died, or somebody has pressed Ctrl-C) leaves its reason before that,
// or the others would wait for it at Gloo.
constexpr const char* kGaveUp = "gave up";
constexpr const char* kGaveUpCount = "gave up/count";

// `gave_up`: why, or empty if it goes on over Gloo.
void tell_failure(const c10::intrusive_ptr<c10d::Store>& store, const std::string& gave_up) {
  try {
    StoreAdapter failures(store);
    if (!gave_up.empty()) {
      failures.set(kGaveUp, gave_up);
      failures.add(kGaveUpCount, 1);
    }
    failures.add(kFailures, 1);
  } catch (const std::exception& error) {
    log_warning(
        concat("the other ranks were not told that this one could not connect: ", error.what()));
  }
}

// Whether a rank can not connect; false where the store is gone. Throws PeerLostError when one has
// given up.
bool has_one_failed(const c10::intrusive_ptr<c10d::Store>& store) {
  std::string why;
  try {
    StoreAdapter failures(store);
    if (failures.add(kFailures, 0) == 0) {
      return false;
    }
    if (failures.add(kGaveUpCount, 0) == 0) {
      return true;
    }
    why = failures.get(kGaveUp, Deadline::after(kTellingPatience));
  } catch (const std::exception&) {
    return false;  // what is asked of the store next says so
  }
  throw PeerLostError(concat("another rank gave up while all met: ", why));
}

}  // namespace

Connected connect_all(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                      const std::vector<int>& numbers, bool for_messages, const Deadline& deadline,
                      const std::function<void()>& look_around) {
  auto next_look = Clock::now();
  const std::function<void()> look = [&] {
    look_around();
    if (Clock::now() >= next_look) {
      next_look = Clock::now() + kLookAtFailures;
      HORON_CHECK(!has_one_failed(store), "another rank could not connect, and says why");
    }
  };
  StoreAdapter meeting(store, look);
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
  try {
    auto streams = meet_everybody(
        meeting, rank, numbers, for_messages ? 2 : 1, network_interfaces_from_environment(),
        {Deadline::after(std::min(left, kMeetingPatience)), &look}, own_door());
    Connected connected;
    for (const RemotePeer& peer : streams[0]) {
      connected.doors.push_back({peer.rank, peer.door, peer.description});
    }
    connected.bytes = std::make_shared<TcpByteTransport>(rank, static_cast<int>(numbers.size()),
                                                         std::move(streams[0]));
    if (for_messages) {
      connected.for_messages = std::move(streams[1]);
    }
    return connected;
  } catch (const PeerLostError& error) {
    tell_failure(store, error.what());
    throw;
  } catch (const Error&) {
    tell_failure(store, "");
    throw;
  } catch (...) {
    tell_failure(store,
                 concat("rank ", numbers[static_cast<std::size_t>(rank)], " was interrupted"));
    throw;
  }
}

// Note [Connected on all ranks]
// A rank that could not connect says so in the store and has no connection to anybody. So one that
// has got a byte from everybody knows that all could; and no rank has if one could not.
Connected connect_all_or_none(const c10::intrusive_ptr<c10d::Store>& store, int rank, int n_ranks,
                              const Deadline& deadline, const std::function<void()>& look_around) {
  std::vector<int> numbers(static_cast<std::size_t>(n_ranks));
  std::iota(numbers.begin(), numbers.end(), 0);
  Connected connected;
  try {
    connected = connect_all(store, rank, numbers, true, deadline, look_around);
  } catch (const PeerLostError&) {
    throw;
  } catch (const Error& error) {
    log_warning_once("carrier",
                     concat("rank ", rank, " has no connections of its own to other ",
                            "hosts, so what the ranks exchange goes over Gloo: ", error.what()));
    return {};
  }
  try {
    (void)is_so_on_all(true, *connected.bytes, n_ranks, {deadline, &look_around});
  } catch (const PeerLostError& error) {
    const auto is_told = [&] { return has_one_failed(store); };
    if (!ask_again(is_told, [] {}, Deadline::after(kTellingPatience))) {
      tell_failure(store, error.what());
      throw;
    }
    return {};
  }
  return connected;
}

bool is_so_on_all(bool is_so, ByteTransport& all, int n_ranks, const WaitContext& context) {
  const auto own = static_cast<std::byte>(is_so);
  std::vector<std::byte> answers(static_cast<std::size_t>(n_ranks));
  all.all_gather(&own, answers.data(), 1, context);
  return std::find(answers.begin(), answers.end(), std::byte{0}) == answers.end();
}

}  // namespace horon::torch_backend
