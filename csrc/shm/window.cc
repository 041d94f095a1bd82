#include "shm/window.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/fork_guard.h"
#include "shm/late_rank.h"
#include "watch/long_wait.h"

namespace horon {
namespace {

constexpr const char* kHowToAllocate =
    "Allocate it with horon.empty(...) or horon.zeros(...) and copy the data there: peers write "
    "into the tensor itself";

// Empty: the tensor can be used.
std::string why_unusable(const GroupArenas& arenas, const WindowTensor& tensor) {
  if (!arenas.is_usable() || !arenas.own()) {
    return "this process has no arena that its peers can see (HORON_ARENA_BYTES=0, or the system "
           "refused one; stderr says why)";
  }
  if (tensor.count > 0 && !arenas.contains(tensor.data, tensor.count * tensor.element_bytes)) {
    return concat("the tensor does not lie in the arena. ", kHowToAllocate);
  }
  return "";
}

}  // namespace

WindowOffer::WindowOffer(OpKind kind, std::shared_ptr<const SharedGroup> group,
                         std::shared_ptr<LentMemory> lent, const WindowTensor& tensor,
                         const std::string& refusal, std::uint64_t number)
    : group_(std::move(group)),
      lent_(std::move(lent)),
      element_bytes_(tensor.element_bytes),
      parts_(static_cast<std::size_t>(group_->peers.n_ranks())) {
  request_.kind = kind;
  request_.dtype = tensor.dtype;
  request_.type_code = tensor.type_code;
  request_.count = tensor.count;
  request_.batch_digest = number;
  request_.refusal = refusal.empty() ? why_unusable(group_->arenas, tensor) : refusal;
  lent_->sweep();
  if (request_.refusal.empty()) {
    try {
      memory_ = std::make_shared<WindowMemory>(group_, tensor.data);
      lent_->add(memory_);
    } catch (const Error& error) {
      request_.refusal = error.what();
    }
  }
  if (memory_) {
    own_.count = tensor.count;
    own_.data_offset = tensor.count > 0 ? group_->arenas.offset_of(tensor.data) : 0;
    own_.words_offset = memory_->words_offset();
    // Of one with more dimensions the others see one.
    const bool is_flat = tensor.sizes.size() > WindowPart::kMaxDimensions;
    own_.n_dimensions = is_flat ? 1 : tensor.sizes.size();
    own_.sizes[0] = static_cast<std::int64_t>(tensor.count);
    if (!is_flat) {
      std::copy(tensor.sizes.begin(), tensor.sizes.end(), own_.sizes);
    }
  }
  for (WindowPart& part : parts_) {
    request_.inputs.push_back({reinterpret_cast<const std::byte*>(&own_), sizeof(WindowPart)});
    request_.outputs.push_back({reinterpret_cast<std::byte*>(&part), sizeof(WindowPart)});
    request_.send_counts.push_back(sizeof(WindowPart));
    request_.recv_counts.push_back(sizeof(WindowPart));
  }
}

void WindowOffer::withdraw() { lent_->take_back(std::exchange(memory_, nullptr).get()); }

std::shared_ptr<WindowAccess> WindowOffer::accept() {
  auto access = std::make_shared<WindowAccess>(group_, lent_, std::move(parts_), element_bytes_);
  memory_.reset();  // the access lets go of it
  return access;
}

WindowOffer::~WindowOffer() {
  if (memory_) {
    memory_->let_go_of_own();
  }
}

Window::Window(std::shared_ptr<WindowAccess> access)
    : access_(std::move(access)),
      fork_generation_(fork_generation()),
      segment_(access_->group().segment),
      peers_(access_->group().peers) {
  for (int source = 0; source < peers_.n_ranks(); ++source) {
    incoming_.emplace_back(&access_->words(source, peers_.rank), &peers_);
  }
}

void Window::check_rank(const char* operation, std::int64_t rank) const {
  if (rank < 0 || rank >= peers_.n_ranks()) {
    throw UsageError(concat("window.", operation, ": rank ", rank,
                            " is not a rank of this group of ", peers_.n_ranks(), "."));
  }
}

void Window::check_open(const char* operation) const {
  if (fork_generation_ != fork_generation()) {
    throw UsageError(concat("window.", operation,
                            ": this process was forked from the one that made the window. Make a ",
                            "group and a window in the child, or start children with spawn."));
  }
  if (segment_.is_poisoned()) {
    throw GroupError(
        concat("window.", operation, ": the group has ended: ", segment_.poison_text()));
  }
  if (segment_.words(peers_.rank).departed.load(std::memory_order_relaxed) != 0) {
    throw GroupError(concat("window.", operation,
                            ": this rank has destroyed the process group. Use windows before ",
                            "destroy_process_group()."));
  }
}

void Window::check_target(const char* operation, int target) const {
  check_rank(operation, target);
  check_open(operation);
  if (segment_.words(target).departed.load(std::memory_order_relaxed) != 0) {
    throw PeerLostError(concat("window.", operation, " to rank ", target, ": ",
                               peers_.describe(target),
                               " left the group (destroyed it or exited)"));
  }
}

void Window::put(int target, std::int64_t offset, const std::byte* data, std::uint64_t count) {
  check_target("put", target);
  const std::uint64_t there = access_->part(target).count;
  if (offset < 0 || static_cast<std::uint64_t>(offset) > there ||
      count > there - static_cast<std::uint64_t>(offset)) {
    throw UsageError(concat("window.put to rank ", target, ": ", count, " elements at offset ",
                            offset, " do not fit into that rank's window of ", there,
                            " elements. Offsets count elements."));
  }
  if (count > 0) {
    const std::size_t element = access_->element_bytes();
    const std::size_t bytes = count * element;
    std::byte* const to = access_->data(target) + static_cast<std::uint64_t>(offset) * element;
    if (to < data + bytes && data < to + bytes) {
      throw UsageError(concat("window.put to rank ", target,
                              ": the tensor overlaps the part of the window that it would be ",
                              "written to. Put a clone() of it."));
    }
    const std::unique_lock lock(store_mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
      store_.copy(to, data, bytes);
    } else {  // another thread is at it, and there is nothing to learn from two at once
      std::memcpy(to, data, bytes);
    }
  }
  raise_signal(access_->words(peers_.rank, target));
}

void Window::signal(int target) {
  check_target("signal", target);
  raise_signal(access_->words(peers_.rank, target));
}

void Window::wait_signal(int source, const WaitContext& context) {
  check_rank("wait_signal", source);
  IncomingSignals& incoming = incoming_[static_cast<std::size_t>(source)];
  if (fork_generation_ == fork_generation() && incoming.take_now()) {
    return;
  }
  const auto signal = expect_signal(source);
  try {
    await(source, *signal, context);
  } catch (const GroupError&) {
    if (incoming.forget(*signal)) {
      throw;
    }  // else it came at the last moment
  } catch (...) {  // check_interrupt's own exception
    incoming.give_back(*signal);
    throw;
  }
}

std::shared_ptr<ExpectedSignal> Window::expect_signal(int source) {
  check_rank("wait_signal", source);
  if (fork_generation_ != fork_generation()) {
    check_open("wait_signal");
  }
  return incoming_[static_cast<std::size_t>(source)].expect();
}

void Window::await(int source, const ExpectedSignal& signal, const WaitContext& context) {
  LongWait wait;
  const auto check = [&] {
    check_wait(source, signal, context.deadline);
    wait.look(context.deadline, [&](bool) {
      return Waiting{concat("window.wait_signal on ", peers_.describe(peers_.rank)),
                     {late_rank(segment_, peers_, source)}};
    });
  };
  incoming_[static_cast<std::size_t>(source)].await(signal, check, context);
  wait.go_on();
}

void Window::check_wait(int source, const ExpectedSignal& signal, const Deadline& deadline) {
  check_open("wait_signal");
  const bool departed = segment_.words(source).departed.load(std::memory_order_acquire) != 0;
  const bool ended = !departed && source != peers_.rank &&
                     has_ended(peers_.peers[static_cast<std::size_t>(source)].liveness_fd.get());
  if ((departed || ended) && !look_for(source, signal)) {  // what it raised before counts
    throw PeerLostError(
        concat("window.wait_signal from rank ", source, ": ", peers_.describe(source),
               departed ? " left the group (destroyed it or exited)" : " died (killed or crashed)",
               " without another signal"));
  }
  if (deadline.has_passed() && !look_for(source, signal)) {
    throw TimeoutError(concat("window.wait_signal: Timed out waiting ", deadline.timeout().count(),
                              "ms for a signal from ", peers_.describe(source),
                              ". No signal was taken; the window and the group can still be ",
                              "used."));
  }
}

}  // namespace horon
