#include "shm/lone_group.h"

#include <unistd.h>

#include <utility>

namespace horon {

std::shared_ptr<SharedGroup> lone_group(const Options& options, const Whereabouts& whereabouts) {
  Options small = options;
  small.buffer_bytes = 0;  // as little as there can be: no collective passes through it
  const SegmentLayout layout(1, small);
  Peers peers;
  Peer own;
  own.pid = ::getpid();
  peers.peers.push_back(std::move(own));
  peers.is_crowded = whereabouts.n_on_machine > whereabouts.cpus_of_machine;
  peers.may_move = may_move_threads_from_environment();
  peers.linger_time =
      peers.is_crowded ? std::chrono::microseconds(0) : linger_time_from_environment();
  return std::make_shared<SharedGroup>(SharedGroup{
      Segment(Mapping::own_memory(layout.total_bytes()), layout), std::move(peers), GroupArenas()});
}

}  // namespace horon
