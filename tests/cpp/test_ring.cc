#include "shm/ring.h"

#include <deque>
#include <random>

#include "catch.h"
#include "core/round_up.h"
#include "rank_threads.h"

using namespace horon;
using namespace horon::testing;

namespace {

std::byte pattern_byte(std::uint64_t id, std::size_t i) {
  return static_cast<std::byte>(id * 31 + i * 7 + (i >> 8));
}

std::vector<std::byte> payload_of(std::uint64_t id, std::size_t bytes) {
  std::vector<std::byte> payload(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    payload[i] = pattern_byte(id, i);
  }
  return payload;
}

Frame frame_of(std::uint64_t id, std::size_t bytes) {
  Frame frame;
  frame.type = FrameType::kData;
  frame.tag = static_cast<std::int32_t>(id % 1000) - 500;
  frame.id = id;
  frame.message_bytes = bytes * 3;
  frame.payload_bytes = bytes;
  return frame;
}

void write(Ring& ring, std::uint64_t id, std::size_t bytes) {
  const std::vector<std::byte> payload = payload_of(id, bytes);
  ring.write(frame_of(id, bytes), payload.data());
}

// Throws unless the next frame is the one that write() wrote.
void read_and_check(Ring& ring, std::uint64_t id, std::size_t bytes) {
  Frame frame;
  expect(ring.peek(&frame), "frame ", id, " is not there");
  const Frame expected = frame_of(id, bytes);
  expect(frame.type == expected.type && frame.tag == expected.tag && frame.id == id &&
             frame.message_bytes == expected.message_bytes && frame.payload_bytes == bytes,
         "frame ", id, " is damaged");
  std::vector<std::byte> payload(bytes);
  ring.consume(frame, payload.data());
  expect(payload == payload_of(id, bytes), "payload of frame ", id, " is damaged");
}

Options ring_options(std::size_t bytes) {
  Options options = small_options();
  options.ring_bytes = bytes;
  return options;
}

}  // namespace

TEST_CASE("a ring takes what it says, to the last byte, at every position") {
  // 4160: frames do not divide the ring, so that frames and payloads wrap in the middle.
  for (const std::size_t ring_bytes : {4096UL, 4160UL}) {
    const LocalGroup group(1, ring_options(ring_bytes));
    Ring ring(*group.segment(0), 0, 0);
    Frame frame;
    REQUIRE_FALSE(ring.peek(&frame));
    const std::size_t room = ring_bytes - sizeof(Frame);
    for (std::uint64_t id = 0; id < 300; ++id) {
      REQUIRE(ring.writable_payload() == static_cast<std::int64_t>(room));
      const std::size_t bytes = id % 3 == 0 ? room : static_cast<std::size_t>(id * 37) % room;
      write(ring, id, bytes);
      const std::size_t used = round_up(sizeof(Frame) + bytes, kCacheLineBytes);
      REQUIRE(ring.writable_payload() == static_cast<std::int64_t>(room - used));
      read_and_check(ring, id, bytes);
      REQUIRE_FALSE(ring.peek(&frame));
    }
  }
}

TEST_CASE("a writer finds the room that a reader has made") {
  const LocalGroup group(2, ring_options(4096));
  Ring writer(*group.segment(0), 0, 1);
  Ring reader(*group.segment(1), 0, 1);
  constexpr std::size_t kBytes = 1024 - sizeof(Frame);
  for (std::uint64_t id = 0; id < 4; ++id) {
    REQUIRE(writer.has_room(kBytes));
    write(writer, id, kBytes);
    REQUIRE(reader.has_frame());
  }
  REQUIRE_FALSE(writer.has_room(0));
  for (std::uint64_t id = 4; id < 100; ++id) {
    read_and_check(reader, id - 4, kBytes);
    REQUIRE_FALSE(writer.has_room(kBytes + 1));
    REQUIRE(writer.has_room(kBytes));
    write(writer, id, kBytes);
    REQUIRE_FALSE(writer.has_room(0));
  }
}

TEST_CASE("many frames of all sizes keep their order") {
  const LocalGroup group(1, ring_options(4096));
  Ring ring(*group.segment(0), 0, 0);
  std::mt19937 random(3);
  std::deque<std::pair<std::uint64_t, std::size_t>> in_ring;
  std::uint64_t next_id = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::size_t bytes = random() % 2 == 0 ? random() % 8 : random() % 1200;
    if (random() % 2 == 0 && ring.writable_payload() >= static_cast<std::int64_t>(bytes)) {
      write(ring, next_id, bytes);
      in_ring.emplace_back(next_id++, bytes);
    } else if (!in_ring.empty()) {
      read_and_check(ring, in_ring.front().first, in_ring.front().second);
      in_ring.pop_front();
    }
  }
  REQUIRE(next_id > 1000);
}

TEST_CASE("a payload can be dropped") {
  const LocalGroup group(1);
  Ring ring(*group.segment(0), 0, 0);
  write(ring, 1, 100);
  write(ring, 2, 0);
  write(ring, 3, 5);
  Frame frame;
  REQUIRE(ring.peek(&frame));
  ring.consume(frame, nullptr);
  read_and_check(ring, 2, 0);
  read_and_check(ring, 3, 5);
}

TEST_CASE("the rings of all pairs are separate") {
  const LocalGroup group(3);
  for (int source = 0; source < 3; ++source) {
    for (int destination = 0; destination < 3; ++destination) {
      Ring ring(*group.segment(source), source, destination);
      write(ring, static_cast<std::uint64_t>(source * 3 + destination), 4000);
    }
  }
  for (int source = 0; source < 3; ++source) {
    for (int destination = 0; destination < 3; ++destination) {
      Ring ring(*group.segment(destination), source, destination);
      read_and_check(ring, static_cast<std::uint64_t>(source * 3 + destination), 4000);
    }
  }
}

TEST_CASE("a writer and a reader on two threads") {
  const LocalGroup group(2);
  constexpr std::uint64_t kFrames = 20000;
  const auto bytes_of = [](std::uint64_t id) {
    return static_cast<std::size_t>(id * 2654435761 % 700);
  };
  require_no_errors(run_ranks(2, [&](int rank) {
    Ring ring(*group.segment(rank), 0, 1);
    for (std::uint64_t id = 0; id < kFrames; ++id) {
      if (rank == 0) {
        while (ring.writable_payload() < static_cast<std::int64_t>(bytes_of(id))) {
          std::this_thread::yield();
        }
        write(ring, id, bytes_of(id));
      } else {
        Frame frame;
        while (!ring.peek(&frame)) {
          std::this_thread::yield();
        }
        read_and_check(ring, id, bytes_of(id));
      }
    }
  }));
}
