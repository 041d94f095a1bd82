#include "named/timeline.h"

#include <cerrno>

#include "core/error.h"

namespace horon {
namespace {

std::string quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", c);
      quoted += code;
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

}  // namespace

Timeline::~Timeline() { stop(); }

void Timeline::start(const std::string& path, int rank, bool mark_cycles) {
  const std::lock_guard lock(mutex_);
  if (file_) {
    finish();
  }
  is_on_.store(false, std::memory_order_relaxed);
  file_.reset(std::fopen(path.c_str(), "w"));
  if (!file_) {
    throw UsageError(concat("the timeline can not be written to '", path,
                            "': ", system_error_text("fopen", errno)));
  }
  std::fputs("[\n", file_.get());
  rows_.clear();
  started_ = Clock::now();
  rank_ = rank;
  mark_cycles_ = mark_cycles;
  is_first_ = true;
  const auto epoch = std::chrono::system_clock::now().time_since_epoch();
  const auto epoch_us = std::chrono::duration_cast<std::chrono::microseconds>(epoch).count();
  std::fprintf(file_.get(),
               "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"rank %d\","
               "\"start_time_since_epoch_in_micros\":%lld}}",
               rank_, rank_, static_cast<long long>(epoch_us));
  is_first_ = false;
  flush();
  is_on_.store(true, std::memory_order_relaxed);
}

void Timeline::stop() {
  const std::lock_guard lock(mutex_);
  if (!file_) {
    return;
  }
  is_on_.store(false, std::memory_order_relaxed);
  finish();
}

void Timeline::finish() {
  std::fputs("\n]\n", file_.get());
  file_.reset();
}

void Timeline::flush() {
  if (file_) {
    std::fflush(file_.get());
  }
}

int Timeline::row_of(const std::string& tensor) {
  const auto [row, is_new] = rows_.emplace(tensor, static_cast<int>(rows_.size()) + 1);
  if (is_new) {
    std::fprintf(file_.get(),
                 "%s{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,"
                 "\"args\":{\"name\":%s}}",
                 is_first_ ? "" : ",\n", rank_, row->second, quoted(tensor).c_str());
    is_first_ = false;
  }
  return row->second;
}

void Timeline::write(const char* phase, const std::string& tensor, const std::string& name) {
  if (!file_) {
    return;
  }
  const int row = row_of(tensor);
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - started_);
  std::fprintf(file_.get(), "%s{\"ph\":\"%s\",\"name\":%s,\"pid\":%d,\"tid\":%d,\"ts\":%.3f%s}",
               is_first_ ? "" : ",\n", phase, quoted(name).c_str(), rank_, row,
               static_cast<double>(now.count()) / 1000, *phase == 'i' ? ",\"s\":\"p\"" : "");
  is_first_ = false;
}

void Timeline::announced(const NamedRequest& request) {
  if (is_on()) {
    const std::lock_guard lock(mutex_);
    for (const TensorSpec& tensor : request.tensors) {
      write("B", tensor.name, concat("NEGOTIATE_", name(request.kind)));
    }
    flush();
  }
}

void Timeline::agreed(const NamedRequest& request) {
  if (is_on()) {
    const std::lock_guard lock(mutex_);
    for (const TensorSpec& tensor : request.tensors) {
      write("E", tensor.name, concat("NEGOTIATE_", name(request.kind)));
    }
    flush();
  }
}

void Timeline::begin(const NamedRequest& request, std::size_t tensor) {
  if (is_on()) {
    const std::lock_guard lock(mutex_);
    write("B", request.tensors[tensor].name, name(request.kind));
    flush();
  }
}

void Timeline::end(const NamedRequest& request, std::size_t tensor) {
  if (is_on()) {
    const std::lock_guard lock(mutex_);
    write("E", request.tensors[tensor].name, name(request.kind));
    flush();
  }
}

void Timeline::mark_cycle() {
  if (is_on()) {
    const std::lock_guard lock(mutex_);
    if (mark_cycles_) {
      write("i", "cycles", "CYCLE_START");
      flush();
    }
  }
}

}  // namespace horon
