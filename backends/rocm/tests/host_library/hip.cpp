// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// libamdhip64 for a machine without AMD's hardware: devices are named in the environment, their memory is the host's, and
// streams do their work at once.
#include "allocations.h"
#include "amd.h"
#include "settings.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>

struct ihipStream_t {
  int device;
};

struct ihipEvent_t {
  std::chrono::steady_clock::time_point when;
  bool recorded;
};

namespace {

thread_local int current = 0;
thread_local hipError_t last = hipSuccess;

// Everything that was handed out, so that what was not is refused.
std::mutex mutex;
std::set<const void*> streams, events;

hipError_t done(hipError_t status) {
  if (status != hipSuccess) last = status;
  return status;
}

// All devices, or those whose numbers HIP_VISIBLE_DEVICES lists (CUDA_VISIBLE_DEVICES, where that is empty), up to the
// first that is no device's number.
std::vector<std::string> devices() {
  const std::vector<std::string> all = host::words(host::setting("HOST_HIP_DEVICES", "gfx942"));
  const std::string hip = host::setting("HIP_VISIBLE_DEVICES", "");
  const std::string list = hip.empty() ? host::setting("CUDA_VISIBLE_DEVICES", "") : hip;
  if (list.empty()) return all;
  std::vector<std::string> visible;
  for (const std::string& word : host::words(list)) {
    char* end = nullptr;
    const long number = std::strtol(word.c_str(), &end, 10);
    if (*end != 0 || number < 0 || number >= static_cast<long>(all.size())) break;
    visible.push_back(all[static_cast<size_t>(number)]);
  }
  return visible;
}

hipError_t check_device(int device) {
  const int count = static_cast<int>(devices().size());
  if (count == 0) return hipErrorNoDevice;
  return device < 0 || device >= count ? hipErrorInvalidDevice : hipSuccess;
}

bool known(const std::set<const void*>& all, const void* one) {
  std::lock_guard<std::mutex> lock(mutex);
  return all.count(one) != 0;
}

bool is_stream(hipStream_t stream) { return stream == nullptr || known(streams, stream); }

// 64 lanes on gfx9, 32 on later generations.
int warp_size(const std::string& arch) { return arch.rfind("gfx9", 0) == 0 ? 64 : 32; }

// gfx942 is 9.4, gfx90a is 9.0, gfx1201 is 12.0.
int major_of(const std::string& arch) { return std::atoi(arch.substr(3, arch.size() - 5).c_str()); }
int minor_of(const std::string& arch) { return arch[arch.size() - 2] - '0'; }

constexpr int kUnits = 304;
constexpr size_t kMemory = size_t{192} << 30, kShared = 64 << 10;

}  // namespace

HOST_EXPORT hipError_t hipInit(unsigned int) { return done(devices().empty() ? hipErrorNoDevice : hipSuccess); }

HOST_EXPORT hipError_t hipGetDeviceCount(int* count) {
  if (!count) return done(hipErrorInvalidValue);
  *count = static_cast<int>(devices().size());
  return done(*count == 0 ? hipErrorNoDevice : hipSuccess);
}

HOST_EXPORT hipError_t hipSetDevice(int device) {
  const hipError_t status = check_device(device);
  if (status == hipSuccess) current = device;
  return done(status);
}

HOST_EXPORT hipError_t hipGetDevice(int* device) {
  if (!device) return done(hipErrorInvalidValue);
  if (devices().empty()) return done(hipErrorNoDevice);
  *device = current;
  return hipSuccess;
}

HOST_EXPORT hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* properties, int device) {
  if (!properties) return done(hipErrorInvalidValue);
  const hipError_t status = check_device(device);
  if (status != hipSuccess) return done(status);
  const std::string arch = devices()[static_cast<size_t>(device)];
  std::memset(properties, 0, sizeof(*properties));
  std::snprintf(properties->name, sizeof(properties->name), "host stand-in for %s", arch.c_str());
  std::snprintf(properties->gcnArchName, sizeof(properties->gcnArchName), "%s:sramecc+:xnack-", arch.c_str());
  properties->totalGlobalMem = kMemory;
  properties->sharedMemPerBlock = kShared;
  properties->warpSize = warp_size(arch);
  properties->major = major_of(arch);
  properties->minor = minor_of(arch);
  properties->multiProcessorCount = kUnits;
  return hipSuccess;
}

HOST_EXPORT hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  if (!value) return done(hipErrorInvalidValue);
  const hipError_t status = check_device(device);
  if (status != hipSuccess) return done(status);
  const std::string arch = devices()[static_cast<size_t>(device)];
  switch (static_cast<int>(attribute)) {
    case hipDeviceAttributeWarpSize: *value = warp_size(arch); return hipSuccess;
    case hipDeviceAttributePhysicalMultiProcessorCount:
    case hipDeviceAttributeMultiprocessorCount: *value = kUnits; return hipSuccess;
    case hipDeviceAttributeComputeCapabilityMajor: *value = major_of(arch); return hipSuccess;
    case hipDeviceAttributeComputeCapabilityMinor: *value = minor_of(arch); return hipSuccess;
    case hipDeviceAttributeMaxSharedMemoryPerBlock: *value = static_cast<int>(kShared); return hipSuccess;
    default: return done(hipErrorInvalidValue);
  }
}

HOST_EXPORT hipError_t hipRuntimeGetVersion(int* version) {
  if (!version) return done(hipErrorInvalidValue);
  *version = std::atoi(host::setting("HOST_HIP_VERSION", "70253211").c_str());
  return hipSuccess;
}

HOST_EXPORT hipError_t hipDriverGetVersion(int* version) { return hipRuntimeGetVersion(version); }

HOST_EXPORT const char* hipGetErrorName(hipError_t error) {
  switch (static_cast<int>(error)) {
    case hipSuccess: return "hipSuccess";
    case hipErrorInvalidValue: return "hipErrorInvalidValue";
    case hipErrorOutOfMemory: return "hipErrorOutOfMemory";
    case hipErrorNoDevice: return "hipErrorNoDevice";
    case hipErrorInvalidDevice: return "hipErrorInvalidDevice";
    case hipErrorInvalidHandle: return "hipErrorInvalidHandle";
    case hipErrorNotFound: return "hipErrorNotFound";
    case hipErrorNotReady: return "hipErrorNotReady";
    case hipErrorNotSupported: return "hipErrorNotSupported";
    default: return "hipErrorUnknown";
  }
}

HOST_EXPORT const char* hipGetErrorString(hipError_t error) {
  switch (static_cast<int>(error)) {
    case hipSuccess: return "no error";
    case hipErrorInvalidValue: return "invalid argument";
    case hipErrorOutOfMemory: return "out of memory";
    case hipErrorNoDevice: return "no ROCm-capable device is detected";
    case hipErrorInvalidDevice: return "invalid device ordinal";
    case hipErrorInvalidHandle: return "invalid resource handle";
    case hipErrorNotFound: return "named symbol not found";
    case hipErrorNotReady: return "device not ready";
    case hipErrorNotSupported: return "operation not supported";
    default: return "unknown error";
  }
}

HOST_EXPORT hipError_t hipGetLastError() {
  const hipError_t error = last;
  last = hipSuccess;
  return error;
}

HOST_EXPORT hipError_t hipPeekAtLastError() { return last; }

HOST_EXPORT hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned int) {
  if (!stream) return done(hipErrorInvalidValue);
  const hipError_t status = check_device(current);
  if (status != hipSuccess) return done(status);
  *stream = new ihipStream_t{current};
  std::lock_guard<std::mutex> lock(mutex);
  streams.insert(*stream);
  return hipSuccess;
}

HOST_EXPORT hipError_t hipStreamCreate(hipStream_t* stream) { return hipStreamCreateWithFlags(stream, 0); }

HOST_EXPORT hipError_t hipStreamDestroy(hipStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!streams.erase(stream)) return done(hipErrorInvalidHandle);
  delete stream;
  return hipSuccess;
}

HOST_EXPORT hipError_t hipStreamSynchronize(hipStream_t stream) {
  return done(is_stream(stream) ? hipSuccess : hipErrorInvalidHandle);
}

HOST_EXPORT hipError_t hipStreamQuery(hipStream_t stream) { return hipStreamSynchronize(stream); }

HOST_EXPORT hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status) {
  if (!status) return done(hipErrorInvalidValue);
  *status = hipStreamCaptureStatusNone;
  return hipStreamSynchronize(stream);
}

HOST_EXPORT hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned int) {
  return done(is_stream(stream) && known(events, event) ? hipSuccess : hipErrorInvalidHandle);
}

HOST_EXPORT hipError_t hipDeviceSynchronize() { return done(check_device(current)); }

HOST_EXPORT hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned int) {
  if (!event) return done(hipErrorInvalidValue);
  *event = new ihipEvent_t{{}, false};
  std::lock_guard<std::mutex> lock(mutex);
  events.insert(*event);
  return hipSuccess;
}

HOST_EXPORT hipError_t hipEventCreate(hipEvent_t* event) { return hipEventCreateWithFlags(event, 0); }

HOST_EXPORT hipError_t hipEventDestroy(hipEvent_t event) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!events.erase(event)) return done(hipErrorInvalidHandle);
  delete event;
  return hipSuccess;
}

HOST_EXPORT hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  if (!known(events, event) || !is_stream(stream)) return done(hipErrorInvalidHandle);
  *event = {std::chrono::steady_clock::now(), true};
  return hipSuccess;
}

HOST_EXPORT hipError_t hipEventSynchronize(hipEvent_t event) {
  return done(known(events, event) ? hipSuccess : hipErrorInvalidHandle);
}

HOST_EXPORT hipError_t hipEventQuery(hipEvent_t event) { return hipEventSynchronize(event); }

HOST_EXPORT hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t start, hipEvent_t stop) {
  if (!milliseconds) return done(hipErrorInvalidValue);
  if (!known(events, start) || !known(events, stop) || !start->recorded || !stop->recorded) return done(hipErrorInvalidHandle);
  *milliseconds = std::chrono::duration<float, std::milli>(stop->when - start->when).count();
  return hipSuccess;
}

HOST_EXPORT hipError_t hipMalloc(void** pointer, size_t bytes) {
  if (!pointer) return done(hipErrorInvalidValue);
  const hipError_t status = check_device(current);
  if (status != hipSuccess) return done(status);
  *pointer = nullptr;
  if (bytes == 0) return hipSuccess;
  constexpr size_t kAlignment = 256;
  void* block = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (!block) return done(hipErrorOutOfMemory);
  std::memset(block, 0xff, bytes);  // NaN in most types: what is read before it is written shows
  *pointer = block;
  host::allocations().add(block, bytes);
  return hipSuccess;
}

HOST_EXPORT hipError_t hipFree(void* pointer) {
  if (!pointer) return hipSuccess;
  if (!host::allocations().remove(pointer)) return done(hipErrorInvalidValue);
  std::free(pointer);
  return hipSuccess;
}

HOST_EXPORT hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind) {
  if (bytes && (!to || !from)) return done(hipErrorInvalidValue);
  if (bytes) std::memmove(to, from, bytes);
  return hipSuccess;
}

HOST_EXPORT hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind kind, hipStream_t stream) {
  return is_stream(stream) ? hipMemcpy(to, from, bytes, kind) : done(hipErrorInvalidHandle);
}

HOST_EXPORT hipError_t hipMemset(void* to, int value, size_t bytes) {
  if (bytes && !to) return done(hipErrorInvalidValue);
  if (bytes) std::memset(to, value, bytes);
  return hipSuccess;
}

HOST_EXPORT hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t stream) {
  return is_stream(stream) ? hipMemset(to, value, bytes) : done(hipErrorInvalidHandle);
}
