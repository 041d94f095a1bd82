// Collectives of a group on several hosts, of which some have several ranks: within each host
// through what its ranks share, and between hosts only what others must have.
//
// Note [Hosts]
// A reduction has three parts. The ranks of each host reduce what they bring, every column (Note
// [Columns]) a part of it; every column does so with what its counterparts on the other hosts have;
// and within each host all get the parts of all columns. So a tensor crosses the network once in
// each direction for every host, and not for every rank. What all ranks get from one (broadcast,
// all_gather) takes the same ways without arithmetic. What each pair of ranks exchanges for itself
// crosses the network as it is.
//
// Note [What other hosts hear]
// A rank that does not arrive, or dies, is known on its own host, which waits for it. The first
// rank of each host, which brings all its headers to the others, brings the reason in their place.
// It waits for them some seconds longer than the operation's time, and those who wait for the
// outcome on its host still longer, so that the one who knows most is heard. Whoever calls later
// than others by more than that may be blamed for waiting.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/header.h"
#include "core/scratch.h"
#include "core/transport.h"
#include "cross/byte_transport.h"
#include "cross/host_layout.h"
#include "cross/two_steps.h"

namespace horon {

// Thread safety: as Transport.
class HostCollectives {
 public:
  struct Parts {
    HostLayout layout;                      // has_neighbours()
    std::shared_ptr<void> kept;             // what `local` needs; destroyed after it
    std::unique_ptr<Transport> local;       // between the ranks of this host; null if it is alone
    std::shared_ptr<ByteTransport> column;  // in the order of hosts; null if it is in none
    // For each column and round, at most.
    std::uint64_t part_bytes = std::uint64_t{8} << 20;
  };
  explicit HostCollectives(Parts parts);

  // What all parts of an operation know.
  struct Call {
    OperationName operation;
    WaitContext context;
  };

  const HostLayout& layout() const { return parts_.layout; }

  // Every rank gives `bytes` and gets all, in rank order. Throws GroupError with the reason if a
  // rank does not come; also that of another host.
  void all_gather(const std::byte* send, std::byte* receive, std::size_t bytes, const Call& call);

  // A reduction to all or to a root.
  void reduce(const Request& request, const TwoSteps& steps, const Call& call);
  void reduce_scatter(const Request& request, const TwoSteps& steps, const Call& call);
  // The part of an exchange that stays on this host.
  void exchange_with_neighbours(const Request& request, const Call& call);
  // The other part, after it, where has_shared_input(). `headers` of all ranks.
  void share_between_hosts(const Request& request, const std::vector<HeaderView>& headers,
                           const Call& call);

  // Running and later calls fail with the reason, also those of the ranks of this host.
  void abort(const std::string& reason);
  void depart();

 private:
  class Shared;

  // The same where a rank has so many of these at a time.
  std::uint64_t part_bytes(std::size_t n_copies) const;
  std::size_t n_neighbours() const { return parts_.layout.neighbours().size(); }
  // This rank's part of what its host has of something.
  Part own_part(std::uint64_t count) const;
  Part part_of_column(std::uint64_t count, std::size_t index) const;
  void run_locally(Request& request, const OperationName& whole, const WaitContext& context) const;
  // Elements of what this rank brings as the first step takes them, and what that step makes of the
  // parts of all columns: this one's. `parts`: by column, one after another in `brought`.
  const std::byte* take_first_step(const Request& request, const TwoSteps& steps,
                                   const std::byte* brought, const std::vector<Part>& parts,
                                   const Call& call);
  // Elements `range` of what this rank brings for the ranks of a host, one after another, as the
  // first step takes them. `begins`: by rank of the host, and the end.
  static void take_input(const Request& request, const TwoSteps& steps,
                         const std::vector<int>& ranks, const std::vector<std::uint64_t>& begins,
                         Part range, std::byte* to);
  // Every rank of this host gets its elements of [of_host.begin, of_host.end), of which this column
  // has its part in `result`.
  void hand_out(const Request& request, const std::vector<std::uint64_t>& begins, Part of_host,
                const std::byte* result, const Call& call) const;
  // Bytes: the rank of this host with that index gets what all columns have of a result.
  void give_to_root(std::size_t root, std::byte* whole, const std::vector<Part>& parts,
                    const Call& call) const;
  // Throws what a host has said instead of bringing its headers. Of each host there is a block, in
  // which flags for its missing ranks begin at `flags_at`.
  // `own_reason`: why blocks may not have come.
  void check_reasons(std::size_t block, std::size_t flags_at,
                     const std::string& own_reason = "") const;
  // Bytes: every rank gets what the others of its host have; `parts`: by rank of the host, in
  // `whole`, where this rank's lies already.
  void share_locally(std::byte* whole, const std::vector<Part>& parts, const Call& call) const;

  const Parts parts_;
  std::vector<std::byte> block_;   // headers of this host, and the reason why there are none
  std::vector<std::byte> blocks_;  // the same of all hosts
  Scratch brought_;                // by this rank, as the first step takes it
  Scratch partial_;                // what that makes
  Scratch received_;               // from other hosts
  Scratch scratch_;                // of the second step
  Scratch result_;                 // on its way to other ranks of this host
};

}  // namespace horon
