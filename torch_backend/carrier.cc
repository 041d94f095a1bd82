#include "carrier.h"

#include <algorithm>

#include "core/error.h"
#include "core/log.h"
#include "core/options.h"
#include "cross/full_meeting.h"
#include "cross/tcp_byte_transport.h"
#include "store_adapter.h"

namespace horon::torch_backend {
namespace {

// All have just met.
constexpr std::chrono::seconds kMeetingPatience{30};

}  // namespace

std::shared_ptr<ByteTransport> connect_all(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                           const std::vector<int>& numbers,
                                           const std::function<void()>& look_around) {
  StoreAdapter meeting(store, look_around);
  const std::function<void()> interrupt = [&] { meeting.look_around(); };
  try {
    auto peers = meet_everybody(meeting, rank, numbers, network_interfaces_from_environment(),
                                {Deadline::after(kMeetingPatience), &interrupt});
    return std::make_shared<TcpByteTransport>(rank, static_cast<int>(numbers.size()),
                                              std::move(peers));
  } catch (const Error& error) {
    log_warning_once("carrier", concat("rank ", numbers[static_cast<std::size_t>(rank)],
                                       " has no connections of its own to other hosts, so what ",
                                       "the ranks exchange goes over Gloo: ", error.what()));
    return nullptr;
  }
}

bool is_so_on_all(bool is_so, ByteTransport& all, int n_ranks, const WaitContext& context) {
  const auto own = static_cast<std::byte>(is_so);
  std::vector<std::byte> answers(static_cast<std::size_t>(n_ranks));
  all.all_gather(&own, answers.data(), 1, context);
  return std::find(answers.begin(), answers.end(), std::byte{0}) == answers.end();
}

}  // namespace horon::torch_backend
