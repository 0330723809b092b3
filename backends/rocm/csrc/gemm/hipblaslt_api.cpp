// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "gemm/hipblaslt_api.h"

#include "common/shared_library.h"

#include <mutex>
#include <vector>

namespace ted_rocm::lt {

namespace {

std::mutex mutex;
Api opened;
bool is_open = false;
std::vector<Handle> handles;

}  // namespace

void open(const char* path) {
  std::lock_guard<std::mutex> lock(mutex);
  if (is_open) return;
  const SharedLibrary library("hipBLASLt", path);
  Api found;
#define TED_RESOLVE(member, name, parameters) library.resolve(#name, found.member);
  TED_HIPBLASLT_FUNCTIONS(TED_RESOLVE)
#undef TED_RESOLVE
  opened = found;
  is_open = true;
}

const Api& api() {
  if (!is_open) throw std::runtime_error("hipBLASLt is not open");
  return opened;
}

Handle handle_of(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  const int visible = hip::device_count();
  if (device < 0 || device >= visible)
    throw std::invalid_argument("device: got " + std::to_string(device) + ", this process sees " + std::to_string(visible));
  if (handles.size() <= static_cast<size_t>(device)) handles.resize(device + 1, nullptr);
  if (handles[device] == nullptr) check(api().create(&handles[device]), "hipblasLtCreate");
  return handles[device];
}

const char* status_name(Status status) {
  static const char* const names[] = {
      "success",        "not initialized", "allocation failed",    "invalid value",  "mapping error",
      "execution failed", "internal error", "not supported", "architecture mismatch", "null handle",
      "invalid enum",   "unknown"};
  return status >= 0 && status < static_cast<Status>(std::size(names)) ? names[status] : "unknown status";
}

void check(Status status, const char* operation) {
  if (status != kSuccess)
    throw std::runtime_error(std::string(operation) + ": " + status_name(status) + " (" + std::to_string(status) + ")");
}

}  // namespace ted_rocm::lt
