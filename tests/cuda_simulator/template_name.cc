#include "template_name.h"

namespace horon::simulator {
namespace {

std::string trimmed(std::string_view text) {
  const std::size_t first = text.find_first_not_of(' ');
  const std::size_t last = text.find_last_not_of(' ');
  return first == std::string_view::npos ? "" : std::string(text.substr(first, last - first + 1));
}

}  // namespace

std::optional<TemplateName> parse_template(std::string_view text) {
  const std::size_t open = text.find('<');
  if (open == std::string_view::npos) {
    return std::nullopt;
  }
  TemplateName parsed{std::string(text.substr(0, open)), {}, {}};
  int depth = 0;
  std::size_t begin = open + 1;
  for (std::size_t i = open; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '<' || c == '(' || c == '{') {
      ++depth;
    } else if (c == '>' || c == ')' || c == '}') {
      --depth;
    }
    if ((c == ',' && depth == 1) || depth == 0) {
      parsed.arguments.push_back(trimmed(text.substr(begin, i - begin)));
      begin = i + 1;
    }
    if (depth == 0) {
      parsed.rest = std::string(text.substr(i + 1));
      return parsed;
    }
  }
  return std::nullopt;
}

}  // namespace horon::simulator
