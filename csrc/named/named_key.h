// What identifies an operation among all that are in flight: its process set and its name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace horon {

std::string key_of(std::int32_t process_set, const std::string& name);

// Its hash is computed once: each step looks it up in several tables.
struct NamedKey {
  explicit NamedKey(std::string key)
      : text(std::move(key)), hash(std::hash<std::string_view>()(text)) {}

  std::string text;
  std::size_t hash;
};

// For tables of keys, or of pointers to them: found by either, or by the text.
struct NamedKeyHash {
  using is_transparent = void;
  std::size_t operator()(const NamedKey& key) const { return key.hash; }
  std::size_t operator()(const NamedKey* key) const { return key->hash; }
  std::size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>()(text);
  }
};

struct NamedKeyEqual {
  using is_transparent = void;
  bool operator()(const NamedKey* a, const NamedKey* b) const { return a == b || is_same(*a, *b); }
  bool operator()(const std::string& a, const NamedKey& b) const { return a == b.text; }
  bool operator()(const NamedKey& a, const std::string& b) const { return a.text == b; }
  bool operator()(const std::string& a, const std::string& b) const { return a == b; }

 private:
  static bool is_same(const NamedKey& a, const NamedKey& b) {
    return a.hash == b.hash && a.text == b.text;
  }
};

}  // namespace horon
