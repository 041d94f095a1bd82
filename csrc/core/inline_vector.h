// A vector of plain values whose first few live inside it: what an operation carries with it needs
// no allocation for the usual numbers of ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <type_traits>
#include <utility>

namespace horon {

// Thread safety: none. Values are copied bytewise and never destroyed.
template <typename T, std::size_t kInline>
class InlineVector {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  InlineVector() {}  // not defaulted: the places that hold no value yet stay unwritten
  InlineVector(std::initializer_list<T> values) { assign(values.begin(), values.end()); }
  explicit InlineVector(std::size_t size, const T& value = T()) { resize(size, value); }
  InlineVector(const InlineVector& other) { assign(other.begin(), other.end()); }
  InlineVector(InlineVector&& other) noexcept { take(other); }
  InlineVector& operator=(const InlineVector& other) {
    if (this != &other) {
      assign(other.begin(), other.end());
    }
    return *this;
  }
  InlineVector& operator=(InlineVector&& other) noexcept {
    if (this != &other) {
      take(other);
    }
    return *this;
  }
  ~InlineVector() = default;

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return heap_ ? heap_.get() : inline_; }
  const T* data() const { return heap_ ? heap_.get() : inline_; }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  T& back() { return data()[size_ - 1]; }
  const T& back() const { return data()[size_ - 1]; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }

  void clear() { size_ = 0; }
  void push_back(const T& value) {
    const T copy = value;  // `value` may lie in what grow() replaces
    grow(size_ + 1);
    data()[size_++] = copy;
  }
  // New elements are copies of `value`.
  void resize(std::size_t size, const T& value = T()) {
    const T copy = value;
    grow(size);
    if (size > size_) {
      std::fill(data() + size_, data() + size, copy);
    }
    size_ = size;
  }
  template <typename Iterator>
  void assign(Iterator first, Iterator last) {
    size_ = 0;
    grow(static_cast<std::size_t>(std::distance(first, last)));
    for (; first != last; ++first) {
      data()[size_++] = *first;
    }
  }

  void assign(std::size_t size, const T& value) {
    const T copy = value;
    size_ = 0;
    resize(size, copy);
  }

  friend bool operator==(const InlineVector& a, const InlineVector& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  void grow(std::size_t least) {
    if (least <= capacity_) {
      return;
    }
    const std::size_t capacity = std::max(least, 2 * capacity_);
    auto larger = std::make_unique<T[]>(capacity);
    std::copy(begin(), end(), larger.get());
    heap_ = std::move(larger);
    capacity_ = capacity;
  }

  void take(InlineVector& other) noexcept {
    if (other.heap_) {
      heap_ = std::move(other.heap_);
      capacity_ = other.capacity_;
      size_ = other.size_;
      other.capacity_ = kInline;
    } else {  // fits, whatever this one's capacity is
      std::copy(other.inline_, other.inline_ + other.size_, data());
      size_ = other.size_;
    }
    other.size_ = 0;
  }

  T inline_[kInline];
  std::unique_ptr<T[]> heap_;  // takes over when the values outgrow inline_
  std::size_t size_ = 0;
  std::size_t capacity_ = kInline;
};

}  // namespace horon
