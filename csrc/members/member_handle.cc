#include "members/member_handle.h"

#include <charconv>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "shm/boot_id.h"

namespace horon {
namespace {

constexpr char kSeparator = ':';
constexpr std::string_view kKind = "horon";

std::vector<std::string_view> fields_of(std::string_view text) {
  std::vector<std::string_view> fields;
  while (true) {
    const auto end = text.find(kSeparator);
    fields.push_back(text.substr(0, end));
    if (end == std::string_view::npos) {
      return fields;
    }
    text.remove_prefix(end + 1);
  }
}

template <typename Number>
bool read(std::string_view field, Number& number, int base = 10) {
  const char* const begin = field.begin();
  const char* const end = field.end();
  const auto [stopped, error] = std::from_chars(begin, end, number, base);
  return error == std::errc() && stopped == end;
}

std::string hexadecimal(std::uint64_t number) {
  char digits[16];
  const auto [end, error] = std::to_chars(digits, digits + sizeof digits, number, 16);
  return {digits, end};
}

}  // namespace

std::string MemberHandle::encode() const {
  return concat(kKind, kSeparator, rank, kSeparator, hexadecimal(instance), kSeparator, boot_id,
                kSeparator, process.pid, kSeparator, process.pid_namespace, kSeparator,
                process.start_time);
}

MemberHandle MemberHandle::decode(const std::string& text) {
  MemberHandle handle;
  const std::vector<std::string_view> fields = fields_of(text);
  const bool is_one = fields.size() == 7 && fields[0] == kKind && read(fields[1], handle.rank) &&
                      read(fields[2], handle.instance, 16) && read(fields[4], handle.process.pid) &&
                      read(fields[5], handle.process.pid_namespace) &&
                      read(fields[6], handle.process.start_time);
  if (!is_one) {
    throw UsageError(concat("'", text, "' is no handle of a horon group. Give what ",
                            "torch.distributed._get_reconfigure_handle() returned in each member"));
  }
  handle.boot_id = fields[3];
  return handle;
}

MemberHandle own_handle(int rank, std::uint64_t instance) {
  return {rank, instance, boot_id(), own_process()};
}

}  // namespace horon
