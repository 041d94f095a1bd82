#include "watch/answer.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "core/error.h"

namespace horon {
namespace {

constexpr std::size_t kMostLate = 16;
// Separators of records and their fields, of which no name has any.
constexpr char kRecord = '\x1e';
constexpr char kField = '\x1f';

// Not in the middle of a character.
void cut(std::string& text, std::size_t most) {
  if (text.size() <= most) {
    return;
  }
  const auto is_continued = [&] { return (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80; };
  while (most > 0 && is_continued()) {
    --most;
  }
  text.resize(most);
}

// Takes what comes before the separator off the text; all of it where there is none.
std::string take(std::string_view& text, char separator) {
  const std::size_t end = std::min(text.find(separator), text.size());
  std::string part(text.substr(0, end));
  text.remove_prefix(std::min(end + 1, text.size()));
  return part;
}

}  // namespace

std::string answer_text(const std::string& waits, double cores, const std::string& told) {
  char computes[48];
  std::snprintf(computes, sizeof computes, "%.0f %%", 100 * cores);
  std::string text =
      concat(waits.empty() ? "is in no call of horon that has waited for a second" : waits,
             kBeyondWaits, computes, " of a core.");
  if (!told.empty()) {
    text += concat('\n', told);
  }
  return text;
}

std::string encode_answer(std::string text, const std::vector<LateRank>& late) {
  std::string records;
  for (std::size_t i = 0; i < std::min(late.size(), kMostLate); ++i) {
    const LateRank& rank = late[i];
    records += concat(kRecord, rank.name, kField, rank.post, kField, rank.door.address, kField,
                      rank.door.key.port, kField, rank.door.key.nonce);
  }
  std::replace(text.begin(), text.end(), kRecord, ' ');
  cut(text, kMostAnswerBytes - std::min(records.size(), kMostAnswerBytes));
  return text + records;
}

void decode_answer(std::string_view message, Answer* answer) {
  answer->text = take(message, kRecord);
  answer->late.clear();
  while (!message.empty()) {
    const std::string record = take(message, kRecord);
    std::string_view fields = record;
    LateRank rank;
    rank.name = take(fields, kField);
    rank.post = std::strtoull(take(fields, kField).c_str(), nullptr, 10);
    rank.door.address = take(fields, kField);
    rank.door.key.port =
        static_cast<std::uint16_t>(std::strtoul(take(fields, kField).c_str(), nullptr, 10));
    rank.door.key.nonce = std::strtoull(take(fields, kField).c_str(), nullptr, 10);
    answer->late.push_back(std::move(rank));
  }
}

}  // namespace horon
