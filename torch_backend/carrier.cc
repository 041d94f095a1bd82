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

// Whether a rank could not connect, rather than that it has died.
bool has_one_failed(const c10::intrusive_ptr<c10d::Store>& store) {
  StoreAdapter failures(store);
  return ask_again([&] { return failures.add(kFailures, 0) > 0; }, [] {},
                   Deadline::after(kTellingPatience));
}

}  // namespace

Connected connect_all(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                      const std::vector<int>& numbers, bool for_messages, const Deadline& deadline,
                      const std::function<void()>& look_around) {
  StoreAdapter failures(store);
  auto next_look = Clock::now();
  const std::function<void()> look = [&] {
    look_around();
    if (Clock::now() >= next_look) {
      next_look = Clock::now() + kLookAtFailures;
      HORON_CHECK(failures.add(kFailures, 0) == 0, "another rank could not connect, and says why");
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
      connected.doors.push_back({peer.rank, peer.door});
    }
    connected.bytes = std::make_shared<TcpByteTransport>(rank, static_cast<int>(numbers.size()),
                                                         std::move(streams[0]));
    if (for_messages) {
      connected.for_messages = std::move(streams[1]);
    }
    return connected;
  } catch (...) {
    try {
      failures.add(kFailures, 1);  // or the others would wait until their time is over
    } catch (const std::exception& error) {
      log_warning(
          concat("the other ranks were not told that this one could not connect: ", error.what()));
    }
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
  } catch (const PeerLostError&) {
    if (!has_one_failed(store)) {
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
