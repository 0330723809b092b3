// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/hip_api.h"

#include "common/shared_library.h"

#include <cstdlib>
#include <cstring>
#include <mutex>

namespace ted_rocm::hip {

namespace {

std::mutex mutex;
Api opened;
bool is_open = false;

bool debugging() {
  const char* value = std::getenv("TE_DISPATCH_DEBUG");
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

const bool kDebug = debugging();

}  // namespace

void open(const char* path) {
  std::lock_guard<std::mutex> lock(mutex);
  if (is_open) return;
  const SharedLibrary library("HIP's runtime", path);
  Api found;
#define TED_RESOLVE(member, name, parameters) library.resolve(#name, found.member);
  TED_HIP_FUNCTIONS(TED_RESOLVE)
#undef TED_RESOLVE
  library.resolve("hipGetErrorName", found.error_name);
  library.resolve("hipGetErrorString", found.error_text);
  opened = found;
  is_open = true;
}

const Api& api() {
  if (!is_open) throw std::runtime_error("HIP's runtime is not open");
  return opened;
}

int device_count() {
  int count = 0;
  const Error error = api().device_count(&count);
  if (error == kNoDevice) return 0;
  check(error, "hipGetDeviceCount");
  return count;
}

void check(Error error, const char* operation) {
  if (error == kSuccess) return;
  const std::string message =
      std::string(operation) + ": HIP error " + api().error_name(error) + ": " + api().error_text(error);
  api().last_error();  // a sticky error stays; others must not surface again in somebody else's call
  throw HipError(message);
}

Device::Device(int index) {
  int current = -1;
  check(api().get_device(&current), "device of the operands");
  if (current == index) return;
  const int visible = device_count();
  if (index < 0 || index >= visible)
    throw std::invalid_argument("device: got " + std::to_string(index) + ", this process sees " + std::to_string(visible));
  check(api().set_device(index), "device of the operands");
  previous_ = current;
}

Device::~Device() {
  if (previous_ >= 0) api().set_device(previous_);
}

void launched(Stream stream, const char* operation) {
  if (!kDebug) return;
  int status = kNotCapturing;
  if (api().is_capturing(stream, &status) == kSuccess && status == kNotCapturing) check(api().synchronize(stream), operation);
}

}  // namespace ted_rocm::hip
