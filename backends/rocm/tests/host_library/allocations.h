// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The memory that hipMalloc and hipHostMalloc handed out.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>

namespace host {

class Allocations {
 public:
  void add(void* address, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    bytes_[address] = bytes;
  }
  // Whether it was there.
  bool remove(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return bytes_.erase(address) != 0;
  }
  // Bytes of the one with this number, by address; 0 beyond the last.
  size_t at(size_t number, void** address) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (number >= bytes_.size()) return 0;
    const auto found = std::next(bytes_.begin(), static_cast<std::ptrdiff_t>(number));
    *address = found->first;
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<void*, size_t> bytes_;
};

inline Allocations& allocations() {
  static Allocations all;
  return all;
}

}  // namespace host
