#include "cross/message_socket.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "net/tcp_socket.h"

namespace horon {
namespace {

constexpr std::size_t kReceiveBytes = std::size_t{64} << 10;
// Of one connection, before others get their turn.
constexpr int kMostReceives = 8;
// No frame but kData has more: anything else is not what a peer sends.
constexpr std::uint64_t kMostPayload = std::uint64_t{256} << 20;

}  // namespace

MessageSocket::MessageSocket(RemotePeer peer) : peer_(std::move(peer)), guard_(peer_.socket.get()) {
  let_peer_be_late(peer_.socket.get());
}

void MessageSocket::put(const Frame& frame, const std::byte* payload) {
  if (state_ != State::kOpen || is_broken_) {
    is_broken_ = true;
    return;  // nobody reads it
  }
  if (out_done_ == out_.size()) {
    out_.clear();
    out_done_ = 0;
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(&frame);
  out_.insert(out_.end(), bytes, bytes + sizeof frame);
  if (payload != nullptr) {
    out_.insert(out_.end(), payload, payload + frame.payload_bytes);
  }
  put_bytes_ += sizeof frame + (payload != nullptr ? frame.payload_bytes : 0);
}

void MessageSocket::put_stream(const Frame& frame, const std::byte* payload) {
  put(frame);
  if (!is_broken_) {
    stream_ = payload;
    stream_bytes_ = frame.payload_bytes;
    put_bytes_ += frame.payload_bytes;
  }
}

bool MessageSocket::flush() {
  bool has_moved = false;
  while (state_ == State::kOpen && !is_flushed()) {
    std::array<iovec, 2> parts{};
    int n_parts = 0;
    const std::size_t out_left = out_.size() - out_done_;
    if (out_left > 0) {
      parts[0] = {out_.data() + out_done_, out_left};
      n_parts = 1;
    }
    if (stream_bytes_ > 0) {
      parts[static_cast<std::size_t>(n_parts++)] = {const_cast<std::byte*>(stream_), stream_bytes_};
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = static_cast<std::size_t>(n_parts);
    const ssize_t result = ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (result < 0) {
      if (!would_block()) {
        drop_unsent();  // receive() finds the end, after what there is to be read
      }
      return has_moved;
    }
    has_moved = true;
    const auto sent = static_cast<std::size_t>(result);
    const std::size_t of_out = std::min(sent, out_left);
    out_done_ += of_out;
    stream_ += sent - of_out;
    stream_bytes_ -= sent - of_out;
  }
  return has_moved;
}

void MessageSocket::keep_stream() {
  out_.insert(out_.end(), stream_, stream_ + stream_bytes_);
  stream_bytes_ = 0;
}

std::uint64_t MessageSocket::delivered_until() const {
  int unacknowledged = 0;
  (void)::ioctl(fd(), SIOCOUTQ, &unacknowledged);
  const std::uint64_t sent = put_bytes_ - (out_.size() - out_done_) - stream_bytes_;
  // What was said when the two met may be on its way as well.
  return sent - std::min<std::uint64_t>(sent, static_cast<std::uint64_t>(unacknowledged));
}

void MessageSocket::shut() { ::shutdown(fd(), SHUT_WR); }

bool MessageSocket::receive(MessageSink& sink) {
  bool has_moved = false;
  for (int i = 0; i < kMostReceives && state_ == State::kOpen; ++i) {
    std::array<iovec, 2> parts{};
    std::array<std::byte, 4096> dropped;
    std::size_t direct = 0;  // bytes that go straight to where they belong
    if (data_left_ > 0) {    // then nothing is in in_
      std::byte* place = sink.place_of(rank(), data_);
      direct = place != nullptr ? data_left_ : std::min(data_left_, dropped.size());
      parts[0] = {place != nullptr ? place + (data_.payload_bytes - data_left_) : dropped.data(),
                  direct};
    }
    make_room(kReceiveBytes);
    parts[1] = {in_.data() + in_end_, in_.size() - in_end_};
    // What follows must not take the place of what was not dropped yet.
    const bool takes_more = direct == data_left_;
    const std::size_t wanted = direct + (takes_more ? parts[1].iov_len : 0);
    msghdr message{};
    message.msg_iov = direct > 0 ? parts.data() : parts.data() + 1;
    message.msg_iovlen = (direct > 0 ? 1U : 0U) + (takes_more ? 1U : 0U);
    const ssize_t result = ::recvmsg(fd(), &message, MSG_DONTWAIT);
    if (result < 0 && would_block()) {
      return has_moved;
    }
    has_moved = true;
    if (result <= 0) {
      if (said_goodbye_) {  // it may end in an error if what was sent here met nobody
        state_ = State::kLeft;
      } else {
        const bool has_ended = result == 0 || errno == ECONNRESET || errno == EPIPE;
        lose(has_ended ? "" : system_error_text("recv", errno));
      }
      return true;
    }
    const auto received = static_cast<std::size_t>(result);
    const std::size_t of_data = std::min(received, direct);
    if (of_data > 0) {
      data_left_ -= of_data;
      if (data_left_ == 0) {
        sink.on_data(rank(), data_);
      }
    }
    in_end_ += received - of_data;
    parse(sink);
    if (received < wanted) {
      return true;  // there was no more
    }
  }
  return has_moved;
}

void MessageSocket::parse(MessageSink& sink) {
  while (in_end_ - in_begin_ >= sizeof(Frame)) {
    Frame frame;
    std::memcpy(&frame, in_.data() + in_begin_, sizeof frame);
    if (frame.type != FrameType::kData) {
      if (frame.payload_bytes > kMostPayload) {
        lose(concat("it sent ", frame.payload_bytes, " bytes in one piece"));
        return;
      }
      if (in_end_ - in_begin_ < sizeof frame + frame.payload_bytes) {
        make_room(sizeof frame + frame.payload_bytes);
        return;
      }
      said_goodbye_ = said_goodbye_ || frame.type == FrameType::kGoodbye;
      sink.on_frame(rank(), frame, in_.data() + in_begin_ + sizeof frame);
      in_begin_ += sizeof frame + frame.payload_bytes;
      continue;
    }
    in_begin_ += sizeof frame;
    data_ = frame;
    data_left_ = frame.payload_bytes;
    const std::size_t here = std::min(data_left_, in_end_ - in_begin_);
    std::byte* place = sink.place_of(rank(), frame);
    if (place != nullptr && here > 0) {
      std::memcpy(place, in_.data() + in_begin_, here);
    }
    in_begin_ += here;
    data_left_ -= here;
    if (data_left_ > 0) {
      return;  // nothing is left in in_
    }
    sink.on_data(rank(), frame);
  }
}

// For so many bytes after in_begin_.
void MessageSocket::make_room(std::size_t bytes) {
  if (in_begin_ > 0) {
    std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
    in_end_ -= in_begin_;
    in_begin_ = 0;
  }
  if (in_.size() < bytes || in_.size() == in_end_) {
    in_.resize(std::max(bytes, in_end_ + kReceiveBytes));
  }
}

void MessageSocket::lose(const std::string& why) {
  state_ = State::kLost;
  why_lost_ = why;
  drop_unsent();
}

void MessageSocket::drop_unsent() {
  is_broken_ = is_broken_ || !is_flushed();
  out_done_ = out_.size();
  stream_bytes_ = 0;
}

}  // namespace horon
