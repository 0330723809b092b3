// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/queue.h"

#include "common/shared_memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace ted {

namespace {

bool debugging() {
  const char* value = std::getenv("TE_DISPATCH_DEBUG");
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

const bool kDebug = debugging();

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

void raise_cuda(cudaError_t error, const char* operation) {
  std::string message = std::string(operation) + ": CUDA error " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorInsufficientDriver || error == cudaErrorUnsupportedPtxVersion) {
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    message += " (the driver supports CUDA " + version_text(driver) + ", this build needs CUDA " + version_text(runtime) + ")";
  } else if (error == cudaErrorNoKernelImageForDevice) {
    message += " (this build holds code for " TE_DISPATCH_CUDA_BUILT "; TE_DISPATCH_CUDA_ARCHS widens a build)";
  }
  cudaGetLastError();  // a sticky error stays; others must not surface again in somebody else's call
  throw CudaError(message);
}

const DeviceLimits& limits_of(int device) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<DeviceLimits>> known;
  require_size("device", device);
  std::lock_guard<std::mutex> lock(mutex);
  if (known.size() <= static_cast<size_t>(device)) {
    int visible = 0;
    check(cudaGetDeviceCount(&visible), "device limits");
    if (device >= visible)
      throw std::invalid_argument("device: got " + std::to_string(device) + ", this process sees " + std::to_string(visible));
    known.resize(visible);
  }
  if (!known[device]) {
    auto found = std::make_unique<DeviceLimits>();
    check(cudaDeviceGetAttribute(&found->multiprocessors, cudaDevAttrMultiProcessorCount, device), "device limits");
    check(cudaDeviceGetAttribute(&found->shared_memory_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "device limits");
    check(cudaDeviceGetAttribute(&found->major, cudaDevAttrComputeCapabilityMajor, device), "device limits");
    check(cudaDeviceGetAttribute(&found->minor, cudaDevAttrComputeCapabilityMinor, device), "device limits");
    known[device] = std::move(found);
  }
  return *known[device];
}

Queue::Queue(int device, uintptr_t stream) : device_(device), previous_(-1), stream_(pointer<CUstream_st>(stream)) {
  require_size("device", device);
  int current = -1;
  error_ = cudaGetDevice(&current);
  if (error_ == cudaSuccess && current != device) {
    error_ = cudaSetDevice(device);
    if (error_ == cudaSuccess) previous_ = current;
  }
}

Queue::~Queue() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

void allow_shared_memory(const Queue& queue, const void* kernel, int64_t bytes, const char* operation) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int64_t> allowed;  // by kernel and device
  queue.stream();  // the device is current
  std::lock_guard<std::mutex> lock(mutex);
  int64_t& known = allowed[{kernel, queue.device()}];
  if (bytes <= known) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), operation);
  known = bytes;
}

void Queue::launched(const char* operation) const {
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) raise_cuda(error, operation);
  if (kDebug) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream_, &status) == cudaSuccess && status == cudaStreamCaptureStatusNone)
      check(cudaStreamSynchronize(stream_), operation);
  }
}

}  // namespace ted
