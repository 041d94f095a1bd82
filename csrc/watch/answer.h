// What a process says when it is asked what it is doing.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/late_rank.h"

namespace horon {

// How that begins which answer_text() says after the waits.
inline constexpr std::string_view kBeyondWaits = ". Its process uses ";

// What a process says of itself. `waits` as describe_long_waits(); `cores`: how much it computes;
// `told`: more, or empty. Pure.
std::string answer_text(const std::string& waits, double cores, const std::string& told);

struct Answer {
  pid_t pid = 0;                    // as it is called here, if it is of this host
  std::optional<std::string> text;  // nothing: it did not say anything
  bool is_late = false;             // until the deadline
  std::uint64_t post = 0;           // whose answer it is
  std::vector<LateRank> late;       // for whom threads of it wait that do nothing else
};

// One message of at most so many bytes, and what is in it. A text that is too long is cut. Pure.
inline constexpr std::size_t kMostAnswerBytes = std::size_t{60} << 10;
std::string encode_answer(std::string text, const std::vector<LateRank>& late);
void decode_answer(std::string_view message, Answer* answer);

}  // namespace horon
