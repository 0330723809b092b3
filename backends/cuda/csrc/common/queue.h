// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Where work goes: a device and a stream of it, both given by the caller.
#pragma once

#include "common/errors.h"

namespace ted {

// Multiprocessors and shared memory of a device, read once.
struct DeviceLimits {
  int multiprocessors;
  int shared_memory_per_block;  // bytes, the opt-in limit
  int major, minor;
};
const DeviceLimits& limits_of(int device);

// Makes a device current while it lives, and restores the caller's: kernels are launched into the current device's
// context only. Costs about 20 ns where it is current already. Where that fails (no driver, no such device) the error
// waits for the first use, so that wrong arguments are told first, on every machine.
class Queue {
 public:
  Queue(int device, uintptr_t stream);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  int device() const { return device_; }
  cudaStream_t stream() const {
    check(error_, "device of the operands");
    return stream_;
  }
  const DeviceLimits& limits() const {
    check(error_, "device of the operands");
    return limits_of(device_);
  }

  // Call after launches: raises what the launch reported, under the operator's name. With TE_DISPATCH_DEBUG=1 it waits
  // for the kernels, so that an asynchronous error surfaces here (not under capture, where nothing can be waited for).
  void launched(const char* operation) const;

 private:
  int device_;
  int previous_;
  cudaError_t error_;
  cudaStream_t stream_;
};

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace ted
