// One direction between two ranks: frames in a ring of bytes in shared memory.
//
// A frame and its payload are published by one store, so a reader that sees a frame has all of it.
// Each begins a cache line: a small message is one line that travels. What the reader has given
// back is looked at only when there is no room without it, because that line travels, too; for
// that, a writer keeps its Ring.
//
// Thread safety: one writer and one reader at a time, in different processes or not.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/message_frame.h"
#include "shm/segment.h"
#include "shm/shared_store.h"

namespace horon {

class Ring {
 public:
  Ring(const Segment& segment, int source, int destination);

  // Writer. Payload bytes that fit right now, behind a frame; negative: not even the frame does.
  std::int64_t writable_payload();
  // Writer. Whether a frame with so many fits. Cheaper.
  bool has_room(std::uint64_t payload_bytes);
  // Writer. Requires that it fits. `store` chooses how large payloads are copied; may be null.
  void write(const Frame& frame, const std::byte* payload, SharedStore* store = nullptr);

  // Reader, or any thread of its process that only wants to know whether to look.
  bool has_frame() const {
    return words_->written.load(std::memory_order_acquire) !=
           words_->consumed.load(std::memory_order_relaxed);
  }
  // Reader. False when the ring is empty.
  bool peek(Frame* frame) const;
  // Reader. Copies the payload of the frame that peek() gave; `to` may be null to drop it.
  void consume(const Frame& frame, std::byte* to);

 private:
  std::int64_t payload_room() const;
  void copy_in(std::uint64_t position, const void* from, std::size_t bytes, SharedStore* store);
  void copy_out(std::uint64_t position, void* to, std::size_t bytes) const;

  RingWords* words_;
  std::byte* data_;
  std::size_t bytes_;
  // By the reader, as the writer saw it last. Not looked up before it is needed: memory is taken
  // from the system when a ring is first touched.
  std::uint64_t consumed_ = 0;
};

}  // namespace horon
