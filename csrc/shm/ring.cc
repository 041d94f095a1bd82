#include "shm/ring.h"

#include <algorithm>
#include <cstring>

#include "core/round_up.h"
#include "shm/line_copies.h"

namespace horon {
namespace {

std::uint64_t length_in_ring(const Frame& frame) {
  return round_up<std::uint64_t>(sizeof frame + frame.payload_bytes, kCacheLineBytes);
}

}  // namespace

Ring::Ring(const Segment& segment, int source, int destination)
    : words_(&segment.ring_words(source, destination)),
      data_(segment.ring_data(source, destination)),
      bytes_(segment.layout().ring_bytes()) {}

std::int64_t Ring::payload_room() const {
  // Relaxed: only this side writes it.
  const std::uint64_t used = words_->written.load(std::memory_order_relaxed) - consumed_;
  return static_cast<std::int64_t>(bytes_ - used) - static_cast<std::int64_t>(sizeof(Frame));
}

std::int64_t Ring::writable_payload() {
  // Acquire: the reader has finished copying what it gave back.
  consumed_ = words_->consumed.load(std::memory_order_acquire);
  return payload_room();
}

bool Ring::has_room(std::uint64_t payload_bytes) {
  const auto wanted = static_cast<std::int64_t>(payload_bytes);
  return payload_room() >= wanted || writable_payload() >= wanted;
}

void Ring::write(const Frame& frame, const std::byte* payload, SharedStore* store) {
  const std::uint64_t position = words_->written.load(std::memory_order_relaxed);
  copy_in(position, &frame, sizeof frame, nullptr);
  copy_in(position + sizeof frame, payload, frame.payload_bytes, store);
  // Release: publishes frame and payload together.
  words_->written.store(position + length_in_ring(frame), std::memory_order_release);
}

bool Ring::peek(Frame* frame) const {
  const std::uint64_t position = words_->consumed.load(std::memory_order_relaxed);
  // Acquire: pairs with the release in write().
  if (words_->written.load(std::memory_order_acquire) == position) {
    return false;
  }
  copy_out(position, frame, sizeof *frame);
  return true;
}

void Ring::consume(const Frame& frame, std::byte* to) {
  const std::uint64_t position = words_->consumed.load(std::memory_order_relaxed);
  if (to != nullptr) {
    copy_out(position + sizeof frame, to, frame.payload_bytes);
  }
  // Release: the copy is over before the writer may overwrite.
  words_->consumed.store(position + length_in_ring(frame), std::memory_order_release);
}

void Ring::copy_in(std::uint64_t position, const void* from, std::size_t bytes,
                   SharedStore* store) {
  if (bytes == 0) {
    return;
  }
  const auto copy = [&](std::byte* to, const std::byte* source, std::size_t n) {
    store != nullptr ? store->copy(to, source, n) : (void)std::memcpy(to, source, n);
  };
  const std::size_t start = position % bytes_;
  const std::size_t first = std::min(bytes, bytes_ - start);
  const auto* bytes_from = static_cast<const std::byte*>(from);
  copy(data_ + start, bytes_from, first);
  if (first < bytes) {
    copy(data_, bytes_from + first, bytes - first);
  }
}

void Ring::copy_out(std::uint64_t position, void* to, std::size_t bytes) const {
  if (bytes == 0) {
    return;
  }
  const std::size_t start = position % bytes_;
  const std::size_t first = std::min(bytes, bytes_ - start);
  auto* bytes_to = static_cast<std::byte*>(to);
  copy_lines(bytes_to, data_ + start, first);
  copy_lines(bytes_to + first, data_, bytes - first);
}

}  // namespace horon
