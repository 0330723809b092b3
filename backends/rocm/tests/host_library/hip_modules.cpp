// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What AMD's own libhipblaslt calls beside the functions in hip.cpp. With these it answers, on this runtime, which
// algorithms it has for a chip: everything short of running a kernel, which is refused.
#include "amd.h"

#include <cstdio>
#include <cstdlib>

struct ihipModule_t {
  int unused;
};
struct ihipModuleSymbol_t {
  int unused;
};

namespace {
ihipModule_t some_module;
ihipModuleSymbol_t some_function;
}  // namespace

HOST_EXPORT hipError_t hipHostMalloc(void** pointer, size_t bytes, unsigned int) {
  if (!pointer) return hipErrorInvalidValue;
  constexpr size_t kPage = 4096;
  *pointer = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  return *pointer ? hipSuccess : hipErrorOutOfMemory;
}

HOST_EXPORT hipError_t hipHostFree(void* pointer) {
  std::free(pointer);
  return hipSuccess;
}

HOST_EXPORT hipError_t hipModuleLoad(hipModule_t* module, const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  if (!file) return hipErrorNotFound;
  std::fclose(file);
  *module = &some_module;
  return hipSuccess;
}

HOST_EXPORT hipError_t hipModuleLoadData(hipModule_t* module, const void*) {
  *module = &some_module;
  return hipSuccess;
}

HOST_EXPORT hipError_t hipModuleUnload(hipModule_t) { return hipSuccess; }

HOST_EXPORT hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t, const char*) {
  *function = &some_function;
  return hipSuccess;
}

HOST_EXPORT hipError_t hipExtModuleLaunchKernel(hipFunction_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, size_t, hipStream_t,
                                                void**, void**, hipEvent_t, hipEvent_t, uint32_t) {
  std::fprintf(stderr, "host HIP: kernels do not run here\n");
  return hipErrorNotSupported;
}
