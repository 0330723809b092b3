// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "gemm/cublaslt_api.h"

#include <dlfcn.h>

#include <mutex>
#include <vector>

namespace ted::lt {

namespace {

std::mutex mutex;
Api opened;
bool is_open = false;
std::vector<Handle> handles;

template <class F>
void resolve(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("cuBLASLt lacks ") + name + ": it is too old");
}

}  // namespace

void open(const char* path) {
  std::lock_guard<std::mutex> lock(mutex);
  if (is_open) return;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(std::string("cuBLASLt does not open: ") + dlerror());
  Api found;
#define TED_RESOLVE(member, name, parameters) resolve(library, #name, found.member);
  TED_CUBLASLT_FUNCTIONS(TED_RESOLVE)
#undef TED_RESOLVE
  resolve(library, "cublasLtGetVersion", found.version);
  resolve(library, "cublasLtGetStatusString", found.status_text);
  opened = found;
  is_open = true;
}

const Api& api() {
  if (!is_open) throw std::runtime_error("cuBLASLt is not open");
  return opened;
}

Handle handle_of(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (handles.size() <= static_cast<size_t>(device)) handles.resize(device + 1, nullptr);
  if (handles[device] == nullptr) check(api().create(&handles[device]), "cublasLtCreate");
  return handles[device];
}

void check(Status status, const char* operation) {
  if (status != kSuccess)
    throw std::runtime_error(std::string(operation) + ": " + api().status_text(status) + " (" + std::to_string(status) + ")");
}

}  // namespace ted::lt
