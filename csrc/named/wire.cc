#include "named/wire.h"

#include <bit>

#include "core/error.h"

namespace horon {
namespace {

// A longer list or name is a damaged message.
constexpr std::uint64_t kMaxLength = std::uint64_t{1} << 28;

class Writer {
 public:
  explicit Writer(Bytes* to) : to_(to) {}

  void byte(std::uint8_t value) { to_->push_back(std::byte{value}); }
  void number(std::uint64_t value) {
    while (value >= 0x80) {
      byte(static_cast<std::uint8_t>(value | 0x80));
      value >>= 7;
    }
    byte(static_cast<std::uint8_t>(value));
  }
  void signed_number(std::int64_t value) {
    number((static_cast<std::uint64_t>(value) << 1) ^ static_cast<std::uint64_t>(value >> 63));
  }
  void real(double value) {
    const auto bits = std::bit_cast<std::uint64_t>(value);
    for (int shift = 0; shift < 64; shift += 8) {
      byte(static_cast<std::uint8_t>(bits >> shift));
    }
  }
  void text(const std::string& value) {
    number(value.size());
    const auto* from = reinterpret_cast<const std::byte*>(value.data());
    to_->insert(to_->end(), from, from + value.size());
  }
  template <typename Integers>
  void list(const Integers& values) {
    number(values.size());
    for (const auto value : values) {
      signed_number(value);
    }
  }

 private:
  Bytes* to_;
};

class Reader {
 public:
  explicit Reader(const Bytes& from) : from_(from) {}

  bool is_at_end() const { return at_ == from_.size(); }

  std::uint8_t byte() {
    HORON_CHECK(at_ < from_.size(), "control message: it ends too early");
    return static_cast<std::uint8_t>(from_[at_++]);
  }
  std::uint64_t number() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const std::uint64_t part = byte();
      value |= (part & 0x7f) << shift;
      if (part < 0x80) {
        return value;
      }
    }
    throw Error("control message: a number is too long");
  }
  std::int64_t signed_number() {
    const std::uint64_t value = number();
    return static_cast<std::int64_t>((value >> 1) ^ (~(value & 1) + 1));
  }
  std::int32_t small_number() {
    const std::int64_t value = signed_number();
    HORON_CHECK(value == static_cast<std::int32_t>(value), "control message: number ", value,
                " is out of range");
    return static_cast<std::int32_t>(value);
  }
  RequestId id() {
    const std::uint64_t value = number();
    HORON_CHECK(value < kNoId, "control message: id ", value, " is out of range");
    return static_cast<RequestId>(value);
  }
  double real() {
    std::uint64_t bits = 0;
    for (int shift = 0; shift < 64; shift += 8) {
      bits |= static_cast<std::uint64_t>(byte()) << shift;
    }
    return std::bit_cast<double>(bits);
  }
  // Of things that take at least a byte each.
  std::size_t length() {
    const std::uint64_t value = number();
    HORON_CHECK(value <= kMaxLength && value <= from_.size() - at_, "control message: a length of ",
                value, " goes beyond its end");
    return static_cast<std::size_t>(value);
  }
  std::string text() {
    const std::size_t size = length();
    std::string value(reinterpret_cast<const char*>(from_.data()) + at_, size);
    at_ += size;
    return value;
  }
  template <typename Integer>
  std::vector<Integer> list() {
    std::vector<Integer> values(length());
    for (Integer& value : values) {
      value = sizeof(Integer) == 4 ? small_number() : static_cast<Integer>(signed_number());
    }
    return values;
  }
  template <typename Enum>
  Enum choice(int count) {
    const std::uint8_t value = byte();
    HORON_CHECK(value < count, "control message: unknown code ", static_cast<int>(value));
    return static_cast<Enum>(value);
  }

 private:
  const Bytes& from_;
  std::size_t at_ = 0;
};

void write(Writer& out, const NamedRequest& request) {
  out.byte(static_cast<std::uint8_t>(request.kind));
  out.byte(static_cast<std::uint8_t>(request.op));
  out.byte(static_cast<std::uint8_t>(request.device));
  out.real(request.prescale);
  out.real(request.postscale);
  out.signed_number(request.root);
  out.signed_number(request.process_set);
  out.signed_number(request.priority);
  out.number(request.tensors.size());
  for (const TensorSpec& tensor : request.tensors) {
    out.text(tensor.name);
    out.byte(static_cast<std::uint8_t>(tensor.dtype));
    out.byte(tensor.type_code);
    out.byte(tensor.element_bytes);
    out.list(tensor.shape);
  }
  out.list(request.ranks);
}

RequestPtr read_request(Reader& in) {
  auto request = std::make_shared<NamedRequest>();
  request->kind = in.choice<NamedKind>(kNamedKindCount);
  request->op = in.choice<NamedOp>(kNamedOpCount);
  request->device = in.choice<DeviceKind>(kDeviceKindCount);
  request->prescale = in.real();
  request->postscale = in.real();
  request->root = in.small_number();
  request->process_set = in.small_number();
  request->priority = in.small_number();
  request->tensors.resize(in.length());
  HORON_CHECK(!request->tensors.empty(), "control message: a request without a name");
  for (TensorSpec& tensor : request->tensors) {
    tensor.name = in.text();
    tensor.dtype = in.choice<DType>(kDTypeCount);
    tensor.type_code = in.byte();
    tensor.element_bytes = in.byte();
    tensor.shape = in.list<std::int64_t>();
  }
  request->ranks = in.list<std::int32_t>();
  return request;
}

void write(Writer& out, const Decision& decision) {
  using Type = Decision::Type;
  out.byte(static_cast<std::uint8_t>(decision.type));
  switch (decision.type) {
    case Type::kRun:
      out.number(decision.id == kNoId ? 0 : decision.id + 1);
      write(out, *decision.request);
      return;
    case Type::kRunKnown:
      out.number(decision.id);
      return;
    case Type::kFail:
      out.byte(decision.is_usage_error ? 1 : 0);
      out.signed_number(decision.process_set);
      out.text(decision.name);
      out.text(decision.text);
      return;
    case Type::kJoined:
      out.signed_number(decision.value);
      return;
    case Type::kSetAdded:
    case Type::kSetRemoved:
      out.signed_number(decision.value);
      write(out, *decision.request);
      return;
    case Type::kGoodbye:
      return;
  }
}

Decision read_decision(Reader& in) {
  using Type = Decision::Type;
  Decision decision;
  decision.type = in.choice<Type>(static_cast<int>(Type::kGoodbye) + 1);
  switch (decision.type) {
    case Type::kRun: {
      const std::uint64_t id = in.number();
      HORON_CHECK(id < kNoId, "control message: id ", id, " is out of range");
      decision.id = id == 0 ? kNoId : static_cast<RequestId>(id - 1);
      decision.request = read_request(in);
      decision.process_set = decision.request->process_set;
      break;
    }
    case Type::kRunKnown:
      decision.id = in.id();
      break;
    case Type::kFail:
      decision.is_usage_error = in.byte() != 0;
      decision.process_set = in.small_number();
      decision.name = in.text();
      decision.text = in.text();
      break;
    case Type::kJoined:
      decision.value = in.small_number();
      break;
    case Type::kSetAdded:
    case Type::kSetRemoved:
      decision.value = in.small_number();
      decision.request = read_request(in);
      break;
    case Type::kGoodbye:
      break;
  }
  return decision;
}

}  // namespace

Bytes encode(const std::vector<Announcement>& announcements) {
  using Type = Announcement::Type;
  Bytes bytes;
  bytes.reserve(4 * announcements.size());
  Writer out(&bytes);
  for (const Announcement& announcement : announcements) {
    out.byte(static_cast<std::uint8_t>(announcement.type));
    if (announcement.type == Type::kRequest) {
      write(out, *announcement.request);
    } else if (announcement.type == Type::kKnown) {
      out.number(announcement.id);
    }
  }
  return bytes;
}

Bytes encode(const std::vector<const Decision*>& decisions) {
  Bytes bytes;
  bytes.reserve(4 * decisions.size());
  Writer out(&bytes);
  for (const Decision* decision : decisions) {
    write(out, *decision);
  }
  return bytes;
}

std::vector<Announcement> decode_announcements(const Bytes& bytes) {
  using Type = Announcement::Type;
  std::vector<Announcement> announcements;
  Reader in(bytes);
  while (!in.is_at_end()) {
    Announcement& announcement = announcements.emplace_back();
    announcement.type = in.choice<Type>(static_cast<int>(Type::kGoodbye) + 1);
    if (announcement.type == Type::kRequest) {
      announcement.request = read_request(in);
    } else if (announcement.type == Type::kKnown) {
      announcement.id = in.id();
    }
  }
  return announcements;
}

std::vector<Decision> decode_decisions(const Bytes& bytes) {
  std::vector<Decision> decisions;
  Reader in(bytes);
  while (!in.is_at_end()) {
    decisions.push_back(read_decision(in));
  }
  return decisions;
}

}  // namespace horon
