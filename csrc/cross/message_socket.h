// One connection between hosts that carries point-to-point messages: frames and their payloads.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/closed_in_child.h"
#include "core/message_frame.h"
#include "cross/greeting.h"

namespace horon {

// Who gets what a connection brings.
class MessageSink {
 public:
  virtual ~MessageSink() = default;
  // A frame other than kData and what follows it, which is gone after the call.
  virtual void on_frame(int source, const Frame& frame, const std::byte* payload) = 0;
  // Where the payload of a kData frame belongs; null to drop it. Asked again before each piece.
  virtual std::byte* place_of(int source, const Frame& frame) = 0;
  // All of it has come.
  virtual void on_data(int source, const Frame& frame) = 0;
};

// Thread safety: one thread at a time. Nothing here blocks.
class MessageSocket {
 public:
  enum class State {
    kOpen,
    kLeft,  // it has said that nothing follows, and nothing did
    kLost,
  };

  explicit MessageSocket(RemotePeer peer);

  int rank() const { return peer_.rank; }
  int fd() const { return peer_.socket.get(); }
  const std::string& description() const { return peer_.description; }
  const Door& door() const { return peer_.door; }
  State state() const { return state_; }
  // Of one that is kLost. Empty: the process at the other end has ended.
  const std::string& why_lost() const { return why_lost_; }

  // Sending, in the order of the calls; flush() does it. Payloads are copied.
  void put(const Frame& frame, const std::byte* payload = nullptr);
  // `payload` must stay until is_flushed(), or keep_stream(). Requires is_flushed().
  void put_stream(const Frame& frame, const std::byte* payload);
  // Whether something moved.
  bool flush();
  // Nothing is left to send: it is with the system, or dropped as is_broken() says.
  bool is_flushed() const { return out_done_ == out_.size() && stream_bytes_ == 0; }
  // Something could not be sent. What has come before may still be received.
  bool is_broken() const { return is_broken_; }
  // The payload of put_stream() is about to go away: what was not sent of it is copied, since the
  // peer could not tell otherwise where the next frame begins.
  void keep_stream();
  // Where the stream of all bytes that were put ends now, and where that ends which the peer's
  // system has. To close the connection before the two meet may lose what lies between.
  std::uint64_t put_until() const { return put_bytes_; }
  std::uint64_t delivered_until() const;
  // Sends nothing more; what was sent still arrives.
  void shut();

  // Gives the sink what has come. Whether that was anything, the end included.
  bool receive(MessageSink& sink);

 private:
  void parse(MessageSink& sink);
  void make_room(std::size_t bytes);
  void lose(const std::string& why);
  void drop_unsent();

  RemotePeer peer_;
  const ClosedInChild guard_;
  State state_ = State::kOpen;
  bool said_goodbye_ = false;
  bool is_broken_ = false;
  std::string why_lost_;
  // To be sent: bytes, then a stream.
  std::vector<std::byte> out_;
  std::size_t out_done_ = 0;
  const std::byte* stream_ = nullptr;
  std::size_t stream_bytes_ = 0;  // left
  std::uint64_t put_bytes_ = 0;   // ever
  // Received: bytes [in_begin_, in_end_) of in_, not looked at yet.
  std::vector<std::byte> in_;
  std::size_t in_begin_ = 0;
  std::size_t in_end_ = 0;
  Frame data_;                 // the kData frame whose payload comes
  std::size_t data_left_ = 0;  // of it
};

}  // namespace horon
