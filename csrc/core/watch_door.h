// Where ranks on other hosts can ask a process what it is doing. See watch/watch_door.h.
#pragma once

#include <cstdint>
#include <string>

namespace horon {

// What the process says of its door.
struct DoorKey {
  std::uint64_t nonce = 0;
  std::uint16_t port = 0;  // 0: there is none

  explicit operator bool() const { return port != 0; }
};

struct Door {
  std::string address;  // numeric
  DoorKey key;

  explicit operator bool() const { return static_cast<bool>(key); }
};

}  // namespace horon
