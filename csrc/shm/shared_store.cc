#include "shm/shared_store.h"

#include <algorithm>
#include <cstring>

#include "core/deadline.h"
#include "shm/line_copies.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace horon {
namespace {

// Below, a measurement is mostly noise and the choice does not matter.
constexpr std::size_t kLeastTimedBytes = 2048;
constexpr std::size_t kMostTriedBytes = std::size_t{16} * 1024;
// From here on the clock costs nothing, and every copy is timed; of smaller ones, one in so many.
constexpr std::size_t kTimedBytes = std::size_t{64} * 1024;
constexpr std::uint32_t kUntimedCopies = 8;

}  // namespace

bool StoreChoice::wants_trial() {
  const bool is_other_unknown = (way_ == Way::kCached ? streaming_ : cached_) == 0;
  if ((is_other_unknown && copies_ >= kCopiesBeforeFirstTrial) || copies_ >= kCopiesBetweenTrials) {
    copies_ = 0;
    return true;
  }
  return false;
}

void StoreChoice::record(Way way, std::size_t bytes, double nanoseconds) {
  ++copies_;
  double& speed = way == Way::kCached ? cached_ : streaming_;
  const double sample = nanoseconds / static_cast<double>(bytes);
  if (speed == 0 || sample < speed) {
    speed = sample;
  } else {  // an interrupted copy says nothing; several slow ones in a row do
    speed = 0.5 * speed + 0.5 * std::min(sample, 4 * speed);
  }
  if (cached_ != 0 && streaming_ != 0) {
    way_ = cached_ > kLeastAdvantage * streaming_ ? Way::kStreaming : Way::kCached;
  }
}

void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes == 0) {
    return;  // an empty tensor has no address, and memcpy takes no null pointer
  }
#if defined(__x86_64__)
  constexpr std::size_t kLine = 64;
  const std::size_t head =
      std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  std::size_t done = head;
  for (; done + kLine <= bytes; done += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from + done);
    auto* target = reinterpret_cast<__m128i*>(to + done);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + done, from + done, bytes - done);
  _mm_sfence();  // streaming stores are not ordered before a release store
#else
  std::memcpy(to, from, bytes);
#endif
}

void SharedStore::copy_untimed(std::byte* to, const std::byte* from, std::size_t bytes) const {
  is_streaming() ? copy_streaming(to, from, bytes) : copy_lines(to, from, bytes);
}

void SharedStore::copy_timed(StoreChoice::Way way, std::byte* to, const std::byte* from,
                             std::size_t bytes) {
  const auto started = Clock::now();
  way == StoreChoice::Way::kStreaming ? copy_streaming(to, from, bytes)
                                      : copy_lines(to, from, bytes);
  choice_.record(way, bytes,
                 std::chrono::duration<double, std::nano>(Clock::now() - started).count());
}

void SharedStore::swap(std::byte* to, std::size_t to_bytes, std::byte* shared,
                       const std::byte* from, std::size_t from_bytes) {
  const std::size_t both = is_streaming() ? 0 : std::min(to_bytes, from_bytes);
  if (both > 0) {
    const auto started = both < kTimedBytes ? Clock::time_point{} : Clock::now();
    swap_lines(to, shared, from, both);
    if (both >= kTimedBytes) {  // as two copies
      choice_.record(StoreChoice::Way::kCached, 2 * both,
                     std::chrono::duration<double, std::nano>(Clock::now() - started).count());
    }
  }
  if (to_bytes > both) {
    copy_lines(to + both, shared + both, to_bytes - both);
  }
  if (from_bytes > both) {
    copy(shared + both, from + both, from_bytes - both);
  }
}

void SharedStore::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes < kLeastTimedBytes) {
    copy_untimed(to, from, bytes);
    return;
  }
  std::size_t tried = 0;
  if (choice_.wants_trial()) {
    tried = std::min(bytes, kMostTriedBytes);
    copy_timed(is_streaming() ? StoreChoice::Way::kCached : StoreChoice::Way::kStreaming, to, from,
               tried);
  }
  const std::size_t rest = bytes - tried;
  if (rest >= kTimedBytes || (rest >= kLeastTimedBytes && ++untimed_ % kUntimedCopies == 0)) {
    copy_timed(choice_.way(), to + tried, from + tried, rest);
  } else if (rest > 0) {
    copy_untimed(to + tried, from + tried, rest);
  }
}

}  // namespace horon
