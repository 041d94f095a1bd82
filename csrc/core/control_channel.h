// How the engines of named operations talk to each other: small messages between the coordinator
// and the other ranks, and sleeping until there is something to do.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/late_rank.h"

namespace horon {

// One thread at a time *attends* to a channel: it sends, receives and may sleep. The background
// thread may sleep on it while somebody else attends; it then does nothing but sleep.
//
// Note [Events]
// events() changes with everything that the attendant should look at: a message, room to send, the
// end of a peer, and wake(). Who wants to sleep reads it, looks around, and sleeps only as long as
// it is what it was. So nothing is missed, whenever it happens.
//
// Thread safety: events(), sleep(), wake(), give_up_meeting(), given_up_meeting(), poison() and
// failure() from any thread; everything else belongs to the attendant.
class ControlChannel {
 public:
  using Bytes = std::vector<std::byte>;
  enum class Sleeper : std::uint8_t { kBackground, kForeground };

  virtual ~ControlChannel() = default;

  // Queues a message. Never blocks. A message that is not urgent need not wake a rank that has left
  // to its background thread with nothing to wait for.
  virtual void send(int rank, Bytes bytes, bool is_urgent) = 0;
  // Writes as much as there is room for; true when nothing is left. Never blocks.
  virtual bool flush() = 0;
  // The next message from anybody; false when there is none. Messages of one rank come in order.
  virtual bool receive(int* source, Bytes* bytes) = 0;

  virtual std::uint32_t events() const = 0;
  // Sleeps until events() differs from `seen`, or for that long at most. The foreground sleeper is
  // the attendant.
  virtual void sleep(Sleeper sleeper, std::uint32_t seen, std::chrono::nanoseconds limit) = 0;
  // Changes events(), and wakes who sleeps and is to be woken.
  virtual void wake() = 0;
  // A short wait of the attendant, which spares a sleep: true when events() differs.
  virtual bool spin(std::uint32_t seen) = 0;
  // After spin(): the same for longer, at most `limit`, of a thread with nothing else to do.
  virtual bool linger(std::uint32_t seen, std::chrono::nanoseconds limit) = 0;
  // As spin(), but shorter, without leaving the core to others or learning from it.
  virtual bool pause(std::uint32_t seen) = 0;

  // From now on events need wake nobody: the caller attends, awake.
  virtual void attend() = 0;
  // From now on events wake the background thread; with `only_urgent`, messages that are not urgent
  // do not. What came before has to be looked for again.
  virtual void leave_to_background(bool only_urgent) = 0;

  // See Note [Meetings] in named_engine.h. The coordinator waits no longer at this meeting and the
  // ones before; whoever waits there for it wakes up.
  virtual void give_up_meeting(std::uint32_t meeting) = 0;
  // The last one that the coordinator gave up. Cheap.
  virtual std::uint32_t given_up_meeting() const = 0;

  // Somebody has poisoned the channel. Cheap.
  virtual bool is_poisoned() = 0;
  // Why nothing can go on: somebody poisoned the channel, or died. Empty while all is well.
  virtual std::string failure() = 0;
  // Whether that rank has left in good order. What it sent before can still be received.
  virtual bool has_departed(int rank) = 0;
  // What is known of the processes of these ranks; nothing where they are on several hosts.
  virtual std::vector<LateRank> late_ranks(const std::vector<int>& /*ranks*/) const { return {}; }
  // Ends everything for all ranks. The first reason counts.
  virtual void poison(const std::string& reason) = 0;
  // This rank leaves in good order.
  virtual void depart() = 0;
};

}  // namespace horon
