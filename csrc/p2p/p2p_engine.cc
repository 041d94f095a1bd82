#include "p2p/p2p_engine.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

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

// A message over a network is worth asking for only when it is larger.
constexpr std::size_t kRemoteEagerBytes = std::size_t{64} << 10;
// Of a message over a network at a time: others to the same rank are not kept for longer.
constexpr std::uint64_t kMostRemotePart = std::uint64_t{1} << 20;

P2pRoster all_share(const Peers& peers) {
  P2pRoster roster;
  roster.rank = peers.rank;
  roster.local.resize(peers.peers.size());
  std::iota(roster.local.begin(), roster.local.end(), 0);
  roster.global_ranks = peers.global_ranks;
  return roster;
}

// Of a send; its type and what follows it are to be added.
Frame frame_of(const P2pOp& op) {
  Frame frame;
  frame.tag = op.tag;
  frame.id = op.id;
  frame.message_bytes = op.bytes;
  return frame;
}

// What a socket has brought of a frame.
struct Brought {
  const std::byte* payload;

  void consume(const Frame& frame, std::byte* to) const {
    if (to != nullptr && frame.payload_bytes > 0) {
      std::memcpy(to, payload, frame.payload_bytes);
    }
  }
};

}  // namespace

std::string P2pOp::describe() const {
  const std::string who = peer == kAnySource ? "any rank" : concat("rank ", peer);
  return concat(is_send ? "send" : "recv", " of ", bytes, " bytes ", is_send ? "to " : "from ", who,
                ", tag ", tag);
}

// What the sockets bring. Requires the lock.
class P2pEngine::Sink final : public MessageSink {
 public:
  explicit Sink(P2pEngine* engine) : engine_(engine) {}

  void on_frame(int source, const Frame& frame, const std::byte* payload) override {
    if (frame.type == FrameType::kGoodbye) {
      return;  // the socket has seen it
    }
    if (frame.type == FrameType::kEnd) {
      engine_->segment_->poison(0, {reinterpret_cast<const char*>(payload), frame.payload_bytes});
      engine_->has_news_ = true;
      return;
    }
    const Brought brought{payload};
    engine_->handle(source, frame, brought);
  }
  std::byte* place_of(int source, const Frame& frame) override {
    const auto found = engine_->streams_.find({source, frame.id});
    if (found == engine_->streams_.end()) {  // its receive has failed meanwhile
      return nullptr;
    }
    const P2pOp& op = *found->second;
    return op.bytes - op.transferred < frame.payload_bytes ? nullptr : op.data + op.transferred;
  }
  void on_data(int source, const Frame& frame) override { engine_->end_part(source, frame); }

 private:
  P2pEngine* const engine_;
};

P2pEngine::P2pEngine(Segment* segment, const Peers* peers, std::size_t eager_bytes)
    : P2pEngine(segment, peers, eager_bytes, all_share(*peers)) {}

P2pEngine::P2pEngine(Segment* segment, const Peers* peers, std::size_t eager_bytes,
                     P2pRoster roster)
    : segment_(segment),
      peers_(peers),
      eager_bytes_(eager_bytes),
      rank_(roster.rank),
      local_(std::move(roster.local)),
      global_ranks_(std::move(roster.global_ranks)),
      on_end_(std::move(roster.on_end)),
      outgoing_(local_.size()),
      incoming_(local_.size()),
      eager_in_flight_(local_.size()) {
  if (!roster.remote.empty()) {
    sockets_ = std::make_unique<MessageSockets>(
        static_cast<int>(local_.size()), std::move(roster.remote), [this] { ring_own_doorbell(); });
  }
  for (std::size_t peer = 0; peer < local_.size(); ++peer) {
    if (local_[peer] >= 0) {
      outgoing_[peer].ring = std::make_unique<Ring>(*segment_, peers_->rank, local_[peer]);
      incoming_[peer] = std::make_unique<Ring>(*segment_, local_[peer], peers_->rank);
    } else {
      outgoing_[peer].socket = sockets_ ? sockets_->at(static_cast<int>(peer)) : nullptr;
      HORON_CHECK(outgoing_[peer].socket != nullptr, "nothing leads to rank ", peer);
    }
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
  const auto peer = static_cast<std::size_t>(op->peer);
  auto& in_flight = eager_in_flight_[peer];
  const std::size_t most = outgoing_[peer].socket == nullptr || eager_bytes_ == 0
                               ? eager_bytes_
                               : std::max(eager_bytes_, kRemoteEagerBytes);
  // Bounds what the receiver has to buffer for messages that it never asked for.
  op->is_eager = op->bytes <= most && in_flight + op->bytes <= 64 * most;
  if (op->is_eager) {
    in_flight += op->bytes;
  }
  sends_[op->id] = op;
  outgoing_[peer].messages.push_back(op);
}

bool P2pEngine::pump() {
  bool moved = false;
  for (int peer = 0; peer < static_cast<int>(outgoing_.size()); ++peer) {
    if (!incoming_[static_cast<std::size_t>(peer)]) {
      continue;
    }
    bool must_tell = false;
    moved = pump_in(peer, &must_tell) || moved;
    if (pump_out(peer)) {  // rings, which tells of room as well: each ring makes a line travel
      moved = true;
    } else if (must_tell) {
      ring_doorbell(peer);
    }
  }
  return (sockets_ && pump_sockets()) || moved;
}

bool P2pEngine::pump_sockets() {
  Sink sink(this);
  bool moved = sockets_->receive(sink, &has_news_);
  for (std::size_t peer = 0; peer < outgoing_.size(); ++peer) {
    if (outgoing_[peer].socket != nullptr) {
      moved = pump_out_socket(outgoing_[peer]) || moved;
    }
  }
  if (std::exchange(has_news_, false)) {
    look_around();
    moved = true;
  }
  return moved;
}

bool P2pEngine::pump_out_socket(Outgoing& out) {
  MessageSocket& socket = *out.socket;
  bool moved = false;
  // Others get their turn, and the lock, in between.
  constexpr int kMostParts = 4;
  for (int i = 0; i < kMostParts; ++i) {
    if (out.control.empty() && out.messages.empty() && socket.is_flushed()) {
      break;
    }
    if (socket.is_flushed() && !socket.is_broken()) {
      end_streamed(out);
      put_messages(out);
    }
    moved = sockets_->flush(socket) || moved;
    if (!socket.is_flushed() || socket.is_broken()) {
      break;
    }
  }
  return moved;
}

// What was streamed, if anything was, is with the system.
void P2pEngine::end_streamed(Outgoing& out) {
  if (out.streamed_bytes == 0) {
    return;
  }
  const Op op = out.messages.front();
  op->transferred += std::exchange(out.streamed_bytes, 0);
  if (op->transferred == op->bytes) {
    out.messages.pop_front();
    finish(op);
  }
}

// Gives the socket what it may send in one go. Requires that it is flushed and nothing is streamed.
void P2pEngine::put_messages(Outgoing& out) {
  for (const Frame& frame : out.control) {
    out.socket->put(frame);
  }
  out.control.clear();
  for (std::uint64_t put = 0; !out.messages.empty() && put <= kRemoteEagerBytes;) {
    const Op op = out.messages.front();
    Frame frame = frame_of(*op);
    if (op->buffered_at == Clock::time_point{}) {
      frame.type = op->is_eager ? FrameType::kEager : FrameType::kRequestToSend;
      frame.payload_bytes = op->is_eager ? op->bytes : 0;
      out.socket->put(frame, op->is_eager ? op->data : nullptr);
      op->put_until = out.socket->put_until();
      op->buffered_at = Clock::now();
      out.messages.pop_front();  // comes back as a stream when the receiver asks for it
      put += sizeof frame + frame.payload_bytes;
      continue;
    }
    frame.type = FrameType::kData;
    frame.payload_bytes = std::min(op->bytes - op->transferred, kMostRemotePart);
    out.socket->put_stream(frame, op->data + op->transferred);
    out.streamed_bytes = frame.payload_bytes;
    return;
  }
}

bool P2pEngine::pump_out(int peer) {
  Outgoing& out = outgoing_[static_cast<std::size_t>(peer)];
  if (out.control.empty() && out.messages.empty()) {
    return false;
  }
  if (out.socket != nullptr) {
    return pump_out_socket(out);
  }
  bool moved = false;
  while (!out.control.empty() && out.ring->has_room(0)) {
    out.ring->write(out.control.front(), nullptr);
    out.control.pop_front();
    moved = true;
  }
  if (moved) {
    ring_doorbell(peer);
  }
  while (out.control.empty() && !out.messages.empty()) {
    const Op op = out.messages.front();
    bool finished = false;
    if (!write_message(*out.ring, op, &finished)) {
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
  Frame frame = frame_of(*op);
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
  Ring& ring = *incoming_[static_cast<std::size_t>(peer)];
  Frame frame;
  bool moved = false;
  while (ring.peek(&frame)) {
    if (frame.type == FrameType::kData) {
      handle_data(peer, frame, ring);
    } else {
      handle(peer, frame, ring);
    }
    moved = true;
    *must_tell = frame.type != FrameType::kData;
    if (!*must_tell) {
      ring_doorbell(peer);  // there is room again, for the next part
    }
  }
  return moved;
}

template <typename Source>
void P2pEngine::handle(int source, const Frame& frame, Source& payload) {
  if (frame.type == FrameType::kEager || frame.type == FrameType::kRequestToSend) {
    arrived(source, frame, payload);
    return;
  }
  payload.consume(frame, nullptr);
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
  ring.consume(frame, found->second->data + found->second->transferred);
  end_part(source, frame);
}

// A part of a message has come to where it belongs.
void P2pEngine::end_part(int source, const Frame& frame) {
  const auto found = streams_.find({source, frame.id});
  if (found == streams_.end()) {
    return;
  }
  const Op op = found->second;
  op->transferred += frame.payload_bytes;
  if (op->transferred == op->bytes) {
    streams_.erase(found);
    finish(op);
  }
}

template <typename Source>
void P2pEngine::arrived(int source, const Frame& frame, Source& payload) {
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
    payload.consume(frame, op->bytes == frame.message_bytes ? op->data : nullptr);
    meet(op, std::move(message));
    return;
  }
  if (message.is_eager) {
    message.payload = std::make_unique<std::byte[]>(frame.payload_bytes);
  }
  payload.consume(frame, message.payload.get());
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
  forget_streamed();
  for (Outgoing& out : outgoing_) {
    out.control.clear();
    out.messages.clear();
  }
}

// An operation that has failed is not sent.
void P2pEngine::forget(const Op& op) {
  Outgoing& out = outgoing_[static_cast<std::size_t>(op->peer)];
  if (out.streamed_bytes > 0 && out.messages.front() == op) {
    out.socket->keep_stream();
    out.streamed_bytes = 0;
  }
  out.messages.erase(std::remove(out.messages.begin(), out.messages.end(), op), out.messages.end());
}

void P2pEngine::forget_streamed() {
  for (Outgoing& out : outgoing_) {
    if (out.streamed_bytes > 0) {
      forget(out.messages.front());
    }
  }
}

void P2pEngine::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  segment_->poison(0, reason);
  say_end(reason);
}

// Ranks that share no memory hear of it so.
void P2pEngine::say_end(const std::string& reason) {
  if (!sockets_ || std::exchange(has_said_end_, true)) {
    return;
  }
  if (on_end_) {
    on_end_(reason);
  }
  Frame frame;
  frame.type = FrameType::kEnd;
  const std::string text = reason.substr(0, kPoisonTextBytes - 1);
  frame.payload_bytes = text.size();
  forget_streamed();
  sockets_->put(frame, reinterpret_cast<const std::byte*>(text.data()));
}

// The last that others hear of this rank. Looks again and again, since no event tells that a peer's
// system has everything.
void P2pEngine::say_goodbye(const Deadline& deadline, std::unique_lock<std::mutex>& lock) {
  if (!std::exchange(has_said_end_, true)) {
    Frame frame;
    frame.type = FrameType::kGoodbye;
    sockets_->put(frame);
  }
  for (pump_sockets(); !sockets_->is_delivered() && !deadline.has_passed(); pump_sockets()) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
  sockets_->shut();
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
  if (!background_.joinable()) {
    lock.unlock();
    help_until(
        [&] {
          const std::lock_guard guard(mutex_);
          return !is_sending() || drain_until.has_passed();
        },
        nullptr);
    lock.lock();
  } else if (!on_own_thread) {
    sends_drained_.wait_until(lock, drain_until.at(), [&] { return !is_sending(); });
  }
  pump();  // the last acknowledgements
  fail_all(reason);
  if (sockets_ && !stop_thread_) {
    say_goodbye(drain_until, lock);
  }
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
  if (sockets_) {
    sockets_->stop();
  }
}

}  // namespace horon
