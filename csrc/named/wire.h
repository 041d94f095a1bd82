// How announcements and decisions are written as bytes.
//
// A message is a list. Numbers are varints (LEB128, zigzag where they may be negative), doubles are
// their eight bytes, and the known ids of a list cost a byte or two each. Readers check every bound
// and every enum, and throw Error for anything that no writer makes.
#pragma once

#include <cstddef>
#include <vector>

#include "named/decision.h"

namespace horon {

using Bytes = std::vector<std::byte>;

Bytes encode(const std::vector<Announcement>& announcements);
Bytes encode(const std::vector<const Decision*>& decisions);

// Throw Error when the bytes are not a message.
std::vector<Announcement> decode_announcements(const Bytes& bytes);
std::vector<Decision> decode_decisions(const Bytes& bytes);

}  // namespace horon
