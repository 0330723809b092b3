// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What AMD's own libhipblaslt calls beside the functions in hip.cpp. With these it answers, on this runtime, which
// algorithms it has for a chip, and launches kernels: through a function that host_hip_set_launcher was given, which may
// execute them; without one a launch is refused.
#include "allocations.h"
#include "amd.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

struct ihipModule_t {
  std::string path;
};
struct ihipModuleSymbol_t {
  std::string name;
};

namespace {

// The files of all modules, one per line; the kernel's name; work-items of the grid, of a workgroup, and bytes of LDS; the
// kernel's arguments. Returns 0 if it was executed.
using Launcher = int (*)(const char* files, const char* kernel, const uint32_t* sizes, const void* arguments, size_t bytes);
Launcher launcher = nullptr;

std::mutex mutex;
std::string files;

constexpr size_t kPage = 4096;

}  // namespace

HOST_EXPORT void host_hip_set_launcher(Launcher given) { launcher = given; }

// Address and bytes of the allocation with this number; 0 beyond the last.
HOST_EXPORT size_t host_hip_allocation(size_t number, void** address) { return host::allocations().at(number, address); }

HOST_EXPORT hipError_t hipHostMalloc(void** pointer, size_t bytes, unsigned int) {
  if (!pointer) return hipErrorInvalidValue;
  *pointer = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (!*pointer) return hipErrorOutOfMemory;
  std::memset(*pointer, 0, bytes);
  host::allocations().add(*pointer, bytes);
  return hipSuccess;
}

HOST_EXPORT hipError_t hipHostFree(void* pointer) {
  if (pointer && !host::allocations().remove(pointer)) return hipErrorInvalidValue;
  std::free(pointer);
  return hipSuccess;
}

HOST_EXPORT hipError_t hipModuleLoad(hipModule_t* module, const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  if (!file) return hipErrorNotFound;
  std::fclose(file);
  std::lock_guard<std::mutex> lock(mutex);
  files += std::string(path) + "\n";
  *module = new ihipModule_t{path};
  return hipSuccess;
}

HOST_EXPORT hipError_t hipModuleLoadData(hipModule_t* module, const void*) {
  *module = new ihipModule_t{};
  return hipSuccess;
}

HOST_EXPORT hipError_t hipModuleUnload(hipModule_t module) {
  delete module;
  return hipSuccess;
}

// The function stays for the process, as the library keeps it.
HOST_EXPORT hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t, const char* name) {
  *function = new ihipModuleSymbol_t{name};
  return hipSuccess;
}

HOST_EXPORT hipError_t hipExtModuleLaunchKernel(hipFunction_t function, uint32_t x, uint32_t y, uint32_t z, uint32_t local_x, uint32_t local_y,
                                                uint32_t local_z, size_t lds, hipStream_t, void**, void** extra, hipEvent_t, hipEvent_t, uint32_t) {
  const void* arguments = nullptr;
  size_t bytes = 0;
  // Pairs of a kind and a value: 1 for the arguments' address, 2 for their size's, 3 for the end.
  for (void** one = extra; one && reinterpret_cast<uintptr_t>(one[0]) != 3; one += 2) {
    if (reinterpret_cast<uintptr_t>(one[0]) == 1) arguments = one[1];
    if (reinterpret_cast<uintptr_t>(one[0]) == 2) bytes = *static_cast<size_t*>(one[1]);
  }
  const uint32_t sizes[] = {x, y, z, local_x, local_y, local_z, static_cast<uint32_t>(lds)};
  if (launcher && arguments && launcher(files.c_str(), function->name.c_str(), sizes, arguments, bytes) == 0) return hipSuccess;
  std::fprintf(stderr, "host HIP: kernel %s was not executed\n", function->name.c_str());
  return hipErrorNotSupported;
}
