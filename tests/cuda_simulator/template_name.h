// The parts of a demangled C++ name.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace horon::simulator {

// "a::b<c<d>, 4>" as {"a::b", {"c<d>", "4"}}; what is behind the last ">" is in `rest`.
struct TemplateName {
  std::string name;
  std::vector<std::string> arguments;
  std::string rest;
};

// None for a name without template arguments.
std::optional<TemplateName> parse_template(std::string_view text);

}  // namespace horon::simulator
