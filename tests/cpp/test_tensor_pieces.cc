#include "core/tensor_pieces.h"

#include <array>
#include <cstring>
#include <random>

#include "catch.h"

using namespace horon;

namespace {

// A piece in a memory of 64 bytes.
struct Placed {
  std::size_t input;
  std::size_t output;
  std::size_t bytes;
};

bool overlap(std::size_t a, std::size_t a_bytes, std::size_t b, std::size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

// Every pair of pieces, and each piece with itself.
bool are_apart_by_definition(const std::vector<Placed>& placed) {
  for (std::size_t i = 0; i < placed.size(); ++i) {
    for (std::size_t j = 0; j < placed.size(); ++j) {
      const bool is_in_place = i == j && placed[i].input == placed[j].output;
      if (!is_in_place &&
          overlap(placed[i].output, placed[i].bytes, placed[j].input, placed[j].bytes)) {
        return false;
      }
      if (i != j && overlap(placed[i].output, placed[i].bytes, placed[j].output, placed[j].bytes)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

TEST_CASE("tensor pieces: every part of a tensor is visited in order") {
  const std::vector<std::size_t> sizes = {3, 0, 1, 8, 5};
  std::vector<std::vector<std::byte>> inputs;
  std::vector<std::vector<std::byte>> outputs;
  TensorPieces pieces;
  std::vector<std::byte> whole;
  for (const std::size_t size : sizes) {
    inputs.emplace_back(size);
    outputs.emplace_back(size);
    for (std::byte& byte : inputs.back()) {
      byte = static_cast<std::byte>(whole.size() + 1);
      whole.push_back(byte);
    }
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    pieces.add(inputs[i].data(), outputs[i].data(), sizes[i]);
  }
  REQUIRE(pieces.bytes() == whole.size());
  for (std::size_t begin = 0; begin <= whole.size(); ++begin) {
    for (std::size_t end = begin; end <= whole.size(); ++end) {
      std::size_t at = begin;
      pieces.visit(begin, end - begin,
                   [&](const std::byte* input, std::byte* output, std::size_t bytes) {
                     REQUIRE(bytes > 0);
                     REQUIRE(std::memcmp(input, whole.data() + at, bytes) == 0);
                     std::memcpy(output, input, bytes);
                     at += bytes;
                   });
      REQUIRE(at == end);
    }
  }
  std::vector<std::byte> copied;
  for (const auto& output : outputs) {
    copied.insert(copied.end(), output.begin(), output.end());
  }
  REQUIRE(copied == whole);
  pieces.clear();
  REQUIRE(pieces.bytes() == 0);
  pieces.visit(0, 0, [](const std::byte*, std::byte*, std::size_t) { FAIL("nothing is there"); });
}

TEST_CASE("tensor pieces: results that would overwrite inputs are seen") {
  std::array<std::byte, 64> memory{};
  std::mt19937 random(1);
  std::array<int, 2> found{};
  for (int round = 0; round < 20000; ++round) {
    std::vector<Placed> placed(1 + random() % 4);
    TensorPieces pieces;
    for (Placed& piece : placed) {
      piece.bytes = 1 + random() % 8;
      piece.input = random() % (memory.size() - piece.bytes);
      piece.output = random() % 2 == 0 ? piece.input : random() % (memory.size() - piece.bytes);
      pieces.add(memory.data() + piece.input, memory.data() + piece.output, piece.bytes);
    }
    REQUIRE(pieces.are_apart() == are_apart_by_definition(placed));
    ++found.at(pieces.are_apart() ? 1 : 0);
  }
  REQUIRE(found[0] > 1000);
  REQUIRE(found[1] > 1000);
}
