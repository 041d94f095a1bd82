#include "shm/p2p_engine.h"

#include <algorithm>

#include "core/error.h"
#include "core/log.h"

namespace horon {
namespace {

std::exception_ptr size_mismatch(const P2pOp& op, std::uint64_t other_bytes) {
  return std::make_exception_ptr(MismatchError(concat(
      op.describe(), ": the ", op.is_send ? "receiver expects " : "sender sent ", other_bytes,
      " bytes. Give both sides tensors of the same size and dtype. The message ",
      "was dropped; the group can still be used.")));
}

}  // namespace

std::string P2pOp::describe() const {
  const std::string who = peer == kAnySource ? "any rank" : concat("rank ", peer);
  return concat(is_send ? "send" : "recv", " of ", bytes, " bytes ", is_send ? "to " : "from ", who,
                ", tag ", tag);
}

P2pEngine::P2pEngine(Segment* segment, const Peers* peers, std::size_t eager_bytes)
    : segment_(segment),
      peers_(peers),
      eager_bytes_(eager_bytes),
      eager_in_flight_(peers->peers.size()) {
  for (int peer = 0; peer < peers_->n_ranks(); ++peer) {
    outgoing_.emplace_back(Ring(*segment_, peers_->rank, peer));
    incoming_.emplace_back(*segment_, peer, peers_->rank);
  }
}

P2pEngine::~P2pEngine() {
  // Either a forked child, where the threads do not exist, or one of the threads, at its end.
  if (background_.joinable()) {
    background_.detach();
  }
  for (std::thread& thread : replaced_) {
    thread.detach();
  }
}

void P2pEngine::start(const Op& op) {
  std::unique_lock lock(mutex_);
  if (!closed_.empty()) {
    throw GroupError(concat(op->describe(), ": ", closed_));
  }
  if (segment_->is_poisoned()) {  // or the other side could take what this one takes for failed
    throw GroupError(concat(op->describe(), ": the group has ended: ", segment_->poison_text()));
  }
  if (op->is_send) {
    start_send(op);
    pump_out(op->peer);  // the other side waits for it
    pump();
  } else {
    pump();  // what has already arrived comes first
    if (match_unexpected(op)) {
      pump();  // its answer
    } else {
      receives_.push_back(op);
    }
  }
  if (is_busy()) {
    tell_background();
  }
  deliver(lock);
}

void P2pEngine::start_send(const Op& op) {
  op->id = next_id_++;
  auto& in_flight = eager_in_flight_[static_cast<std::size_t>(op->peer)];
  // Bounds what the receiver has to buffer for messages that it never asked for.
  op->is_eager = op->bytes <= eager_bytes_ && in_flight + op->bytes <= 64 * eager_bytes_;
  if (op->is_eager) {
    in_flight += op->bytes;
  }
  sends_[op->id] = op;
  outgoing_[static_cast<std::size_t>(op->peer)].messages.push_back(op);
}

bool P2pEngine::pump() {
  bool moved = false;
  for (int peer = 0; peer < peers_->n_ranks(); ++peer) {
    bool must_tell = false;
    moved = pump_in(peer, &must_tell) || moved;
    if (pump_out(peer)) {  // rings, which tells of room as well: each ring makes a line travel
      moved = true;
    } else if (must_tell) {
      ring_doorbell(peer);
    }
  }
  return moved;
}

bool P2pEngine::pump_out(int peer) {
  Outgoing& out = outgoing_[static_cast<std::size_t>(peer)];
  if (out.control.empty() && out.messages.empty()) {
    return false;
  }
  bool moved = false;
  while (!out.control.empty() && out.ring.has_room(0)) {
    out.ring.write(out.control.front(), nullptr);
    out.control.pop_front();
    moved = true;
  }
  if (moved) {
    ring_doorbell(peer);
  }
  while (out.control.empty() && !out.messages.empty()) {
    const Op op = out.messages.front();
    bool finished = false;
    if (!write_message(out.ring, op, &finished)) {
      break;
    }
    if (finished) {
      out.messages.pop_front();
    }
    ring_doorbell(peer);  // now: the other side copies this part out while we copy the next one in
    moved = true;
  }
  return moved;
}

// Writes the next frame of a message; `finished` tells that the queue can forget it for now.
bool P2pEngine::write_message(Ring& ring, const Op& op, bool* finished) {
  Frame frame;
  frame.tag = op->tag;
  frame.id = op->id;
  frame.message_bytes = op->bytes;
  if (op->is_eager) {
    if (!ring.has_room(op->bytes)) {
      return false;
    }
    frame.type = FrameType::kEager;
    frame.payload_bytes = op->bytes;
    ring.write(frame, op->data);
    op->buffered_at = Clock::now();
    *finished = true;
    return true;
  }
  if (op->buffered_at == Clock::time_point{}) {  // not announced yet
    if (!ring.has_room(0)) {
      return false;
    }
    frame.type = FrameType::kRequestToSend;
    ring.write(frame, nullptr);
    op->buffered_at = Clock::now();
    *finished = true;  // comes back as a stream when the receiver asks for it
    return true;
  }
  constexpr std::int64_t kSmallestPart = 1024;  // or the rest
  const std::uint64_t left = op->bytes - op->transferred;
  const std::int64_t room = ring.writable_payload();
  if (room < std::min<std::int64_t>(kSmallestPart, static_cast<std::int64_t>(left))) {
    return false;
  }
  frame.type = FrameType::kData;
  // Small parts, so that both sides copy at the same time.
  constexpr std::uint64_t kMostPart = std::uint64_t{64} * 1024;
  const std::uint64_t part_limit =
      std::min<std::uint64_t>(segment_->layout().ring_bytes() / 4, kMostPart);
  frame.payload_bytes = std::min({left, static_cast<std::uint64_t>(room), part_limit});
  ring.write(frame, op->data + op->transferred, &store_);
  op->transferred += frame.payload_bytes;
  if (op->transferred == op->bytes) {
    *finished = true;
    finish(op);
  }
  return true;
}

bool P2pEngine::pump_in(int peer, bool* must_tell) {
  Ring& ring = incoming_[static_cast<std::size_t>(peer)];
  Frame frame;
  bool moved = false;
  while (ring.peek(&frame)) {
    handle(peer, frame, ring);
    moved = true;
    *must_tell = frame.type != FrameType::kData;
    if (!*must_tell) {
      ring_doorbell(peer);  // there is room again, for the next part
    }
  }
  return moved;
}

void P2pEngine::handle(int source, const Frame& frame, Ring& ring) {
  switch (frame.type) {
    case FrameType::kEager:
    case FrameType::kRequestToSend:
      arrived(source, frame, ring);
      return;
    case FrameType::kData:
      handle_data(source, frame, ring);
      return;
    default:
      break;
  }
  ring.consume(frame, nullptr);
  const auto found = sends_.find(frame.id);
  if (found == sends_.end()) {
    if (frame.type == FrameType::kRefuse) {
      log_warning(concat("a message to rank ", source, ", tag ", frame.tag,
                         ", sent more than a second ago met a receive of another size (",
                         frame.message_bytes, " bytes) and was dropped"));
    }
    return;
  }
  const Op op = found->second;
  if (frame.type == FrameType::kClearToSend) {
    outgoing_[static_cast<std::size_t>(source)].messages.push_back(op);
  } else if (frame.type == FrameType::kAcknowledge) {
    finish(op);
  } else {
    finish(op, size_mismatch(*op, frame.message_bytes));
  }
}

void P2pEngine::handle_data(int source, const Frame& frame, Ring& ring) {
  const auto found = streams_.find({source, frame.id});
  if (found == streams_.end()) {  // its receive has failed meanwhile
    ring.consume(frame, nullptr);
    return;
  }
  const Op op = found->second;
  ring.consume(frame, op->data + op->transferred);
  op->transferred += frame.payload_bytes;
  if (op->transferred == op->bytes) {
    streams_.erase(found);
    finish(op);
  }
}

void P2pEngine::arrived(int source, const Frame& frame, Ring& ring) {
  UnexpectedMessage message;
  message.source = source;
  message.tag = frame.tag;
  message.id = frame.id;
  message.bytes = frame.message_bytes;
  message.is_eager = frame.type == FrameType::kEager;
  const auto receive = std::find_if(receives_.begin(), receives_.end(), [&](const Op& op) {
    return (op->peer == source || op->peer == kAnySource) && op->tag == frame.tag;
  });
  if (receive != receives_.end()) {
    const Op op = std::move(*receive);
    receives_.erase(receive);
    // An eager payload goes straight to where it belongs.
    ring.consume(frame, op->bytes == frame.message_bytes ? op->data : nullptr);
    meet(op, std::move(message));
    return;
  }
  if (message.is_eager) {
    message.payload = std::make_unique<std::byte[]>(frame.payload_bytes);
  }
  ring.consume(frame, message.payload.get());
  unexpected_.push_back(std::move(message));
}

bool P2pEngine::match_unexpected(const Op& receive) {
  const auto found =
      std::find_if(unexpected_.begin(), unexpected_.end(), [&](const UnexpectedMessage& message) {
        return (receive->peer == message.source || receive->peer == kAnySource) &&
               receive->tag == message.tag;
      });
  if (found == unexpected_.end()) {
    return false;
  }
  UnexpectedMessage message = std::move(*found);
  unexpected_.erase(found);
  if (message.is_eager && message.bytes == receive->bytes) {
    std::copy_n(message.payload.get(), message.bytes, receive->data);
  }
  meet(receive, std::move(message));
  return true;
}

// A receive and a message have found each other; an eager payload has been copied where sizes
// agree.
void P2pEngine::meet(const Op& receive, UnexpectedMessage message) {
  receive->source = message.source;
  Frame answer;
  answer.id = message.id;
  answer.tag = message.tag;
  answer.message_bytes = receive->bytes;
  if (receive->bytes != message.bytes) {
    answer.type = FrameType::kRefuse;
    finish(receive, size_mismatch(*receive, message.bytes));
  } else if (message.is_eager) {
    answer.type = FrameType::kAcknowledge;
    finish(receive);
  } else {
    answer.type = FrameType::kClearToSend;
    streams_[{message.source, message.id}] = receive;
  }
  outgoing_[static_cast<std::size_t>(message.source)].control.push_back(answer);
}

void P2pEngine::finish(const Op& op, std::exception_ptr error) {
  op->error = std::move(error);
  if (op->is_send) {
    if (op->is_eager) {
      eager_in_flight_[static_cast<std::size_t>(op->peer)] -= op->bytes;
    }
    sends_.erase(op->id);
    sends_drained_.notify_all();
  }
  finished_.push_back(op);
}

void P2pEngine::fail_all(const std::string& reason) {
  const auto fail = [&](const Op& op) {
    finish(op, std::make_exception_ptr(GroupError(concat(op->describe(), ": ", reason))));
  };
  while (!sends_.empty()) {
    const Op op = sends_.begin()->second;
    fail(op);
  }
  for (const Op& op : receives_) {
    fail(op);
  }
  for (const auto& [key, op] : streams_) {
    fail(op);
  }
  receives_.clear();
  streams_.clear();
  for (Outgoing& out : outgoing_) {
    out.control.clear();
    out.messages.clear();
  }
}

void P2pEngine::close(const Deadline& drain_until, const std::string& reason) {
  std::unique_lock lock(mutex_);
  if (closed_.empty()) {
    closed_ = reason;
  }
  const auto is_own = [](const std::thread& thread) {
    return thread.get_id() == std::this_thread::get_id();
  };
  const bool on_own_thread = is_own(background_);
  if (!on_own_thread) {
    sends_drained_.wait_until(lock, drain_until.at(), [&] { return !is_sending(); });
  }
  pump();  // the last acknowledgements
  fail_all(reason);
  deliver(lock);
  stop_thread_ = true;
  became_busy_.notify_all();
  if (background_watches_) {
    count_background(true);
  }
  ring_own_doorbell();
  std::list<std::thread> threads;
  threads.splice(threads.end(), replaced_);
  if (background_.joinable()) {
    threads.push_back(std::move(background_));
  }
  const auto own = std::find_if(threads.begin(), threads.end(), is_own);
  if (own != threads.end()) {  // in a callback: joined by the next call, or not at all
    replaced_.splice(replaced_.end(), threads, own);
  }
  lock.unlock();
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace horon
