// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The part of HIP's C interface that this backend calls, declared here so that building needs no ROCm. Names and values
// are part of libamdhip64's ABI and equal in releases 6 and 7 of ROCm (HIP API reference).
#pragma once

#include "common/errors.h"

namespace ted_rocm::hip {

using Error = int;
using Stream = void*;

enum : Error { kSuccess = 0, kNoDevice = 100 };
enum CaptureStatus : int { kNotCapturing = 0 };

// Every function of the library that is used: (member, name, parameters).
#define TED_HIP_FUNCTIONS(X)                                       \
  X(device_count, hipGetDeviceCount, (int*))                       \
  X(get_device, hipGetDevice, (int*))                              \
  X(set_device, hipSetDevice, (int))                               \
  X(last_error, hipGetLastError, ())                               \
  X(is_capturing, hipStreamIsCapturing, (Stream, int* status))     \
  X(synchronize, hipStreamSynchronize, (Stream))

struct Api {
#define TED_DECLARE(member, name, parameters) Error(*member) parameters = nullptr;
  TED_HIP_FUNCTIONS(TED_DECLARE)
#undef TED_DECLARE
  const char* (*error_name)(Error) = nullptr;
  const char* (*error_text)(Error) = nullptr;
};

// Opens the file, unless it is open already. Throws std::runtime_error with the linker's message, or naming the
// function that the library lacks.
void open(const char* path);
// The open library; throws std::runtime_error before `open`.
const Api& api();
// Devices that this process sees; 0 where there is none.
int device_count();
// Throws HipError.
void check(Error error, const char* operation);

// Makes a device current while it lives, and restores the caller's: the library launches on the current device.
class Device {
 public:
  // Throws std::invalid_argument for a device that this process does not see.
  explicit Device(int index);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

 private:
  int previous_ = -1;
};

// Call after launches: with TE_DISPATCH_DEBUG=1 it waits for them, so that an asynchronous error surfaces here, under
// the operator's name (not under capture, where nothing can be waited for).
void launched(Stream stream, const char* operation);

}  // namespace ted_rocm::hip
