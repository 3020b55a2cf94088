// Records as a byte stream: written by one participant, read and checked by all.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "format.h"

namespace pool {

class Writer {
 public:
  std::vector<uint8_t> bytes;

  template <class T>
    requires std::is_trivially_copyable_v<T>
  Writer& put(const T& value) {
    return raw(&value, sizeof value);
  }
  template <class T>
  Writer& list(const std::vector<T>& values) {
    put(static_cast<uint32_t>(values.size()));
    return raw(values.data(), values.size() * sizeof(T));
  }
  Writer& text(const std::string& value) {
    put(static_cast<uint32_t>(value.size()));
    return raw(value.data(), value.size());
  }

 private:
  Writer& raw(const void* from, size_t nbytes) {
    const auto* begin = static_cast<const uint8_t*>(from);
    bytes.insert(bytes.end(), begin, begin + nbytes);
    return *this;
  }
};

class Reader {
 public:
  explicit Reader(const std::vector<uint8_t>& bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}

  bool done() const { return at_ == end_; }

  template <class T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  template <class T>
  std::vector<T> list() {
    const size_t count = get<uint32_t>();
    if (count > static_cast<size_t>(end_ - at_) / sizeof(T)) refuse();
    std::vector<T> values(count);
    if (count) std::memcpy(values.data(), take(count * sizeof(T)), count * sizeof(T));
    return values;
  }
  std::string text() {
    const size_t size = get<uint32_t>();
    const uint8_t* from = take(size);
    return std::string(reinterpret_cast<const char*>(from), size);
  }

 private:
  const uint8_t *at_, *end_;

  const uint8_t* take(size_t nbytes) {
    if (nbytes > static_cast<size_t>(end_ - at_)) refuse();
    const uint8_t* from = at_;
    at_ += nbytes;
    return from;
  }
  [[noreturn]] static void refuse() { throw Fault{Fault::kDamaged, "a record is cut short"}; }
};

}  // namespace pool
