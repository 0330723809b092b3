// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Calls the functions of libamdhip64 and libhipblaslt that need no device, and prints what each answers, one per line.
// test_transcript.py runs it with the host library and with AMD's, and compares. Usage: transcript HIP HIPBLASLT
#include "amd.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>

namespace {

void* hip = nullptr;
void* lt = nullptr;

template <class Function>
Function find(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (!found) {
    std::printf("%s: not there\n", name);
    std::exit(2);
  }
  return reinterpret_cast<Function>(found);
}

// Functions are called through the types that follow from the arguments: their declarations differ in the names of types
// alone, which are 32-bit enumerations, pointers and 64-bit integers.
template <class... Arguments>
int call(void* library, const char* name, Arguments... arguments) {
  return find<int (*)(Arguments...)>(library, name)(arguments...);
}

void say(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
}

const std::initializer_list<size_t> kSizes = {0, 1, 2, 4, 7, 8, 16};
// Of preferences: AMD's library reads beyond shorter values.
const std::initializer_list<size_t> kWholeSizes = {0, 8, 16};
// No attribute, and one that no release has.
const std::initializer_list<int> kUnknown = {-1, 4711};
const unsigned char kValue[16] = {0x6f, 0, 0, 0, 0, 0, 0, 0, 1};  // 111, HIPBLAS_OP_N, whatever its width

// Sets an attribute at all sizes, of something and of nothing, and reads it, if AMD's library lets it be read.
void sweep_attribute(const char* kind, void* of, int attribute, const unsigned char* value, bool readable,
                     std::initializer_list<size_t> sizes = kSizes) {
  const std::string prefix = std::string("hipblasLt") + kind;
  const std::string set = prefix + "SetAttribute", get = prefix + "GetAttribute";
  void* const null = nullptr;
  for (const size_t bytes : sizes) {
    say("%s(%d, %zu) = %d", set.c_str(), attribute, bytes, call(lt, set.c_str(), of, attribute, static_cast<const void*>(value), bytes));
    if (!readable) continue;
    unsigned char got[16];
    std::memset(got, 0xee, sizeof(got));
    size_t written = 99;
    const int status = call(lt, get.c_str(), of, attribute, static_cast<void*>(got), bytes, &written);
    say("%s(%d, %zu) = %d, written %zu, %02x%02x%02x%02x %02x%02x%02x%02x %02x", get.c_str(), attribute, bytes, status, written, got[0], got[1],
        got[2], got[3], got[4], got[5], got[6], got[7], got[8]);
  }
  say("%s(%d, null value) = %d", set.c_str(), attribute, call(lt, set.c_str(), of, attribute, static_cast<const void*>(nullptr), size_t{8}));
  say("%s(null, %d) = %d", set.c_str(), attribute, call(lt, set.c_str(), null, attribute, static_cast<const void*>(value), size_t{8}));
  if (!readable) return;
  size_t written = 0;
  unsigned char got[16] = {};
  say("%s(%d, null value) = %d", get.c_str(), attribute, call(lt, get.c_str(), of, attribute, null, size_t{8}, &written));
  say("%s(%d, no size, nowhere) = %d", get.c_str(), attribute,
      call(lt, get.c_str(), of, attribute, static_cast<void*>(got), size_t{0}, static_cast<size_t*>(nullptr)));
  say("%s(null, %d) = %d", get.c_str(), attribute, call(lt, get.c_str(), null, attribute, static_cast<void*>(got), size_t{8}, &written));
}

void descriptors() {
  void* desc = nullptr;
  for (const int compute : {-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 99})
    for (const int scale : {-1, 0, 1, 3, 10, 14, 28, 255}) {  // later releases take fp16 and complex numbers
      void* made = reinterpret_cast<void*>(8);
      const int status = call(lt, "hipblasLtMatmulDescCreate", &made, compute, scale);
      say("hipblasLtMatmulDescCreate(%d, %d) = %d, %s", compute, scale, status, made ? "something" : "null");
      if (status == 0) call(lt, "hipblasLtMatmulDescDestroy", made);
    }
  say("hipblasLtMatmulDescCreate(null) = %d", call(lt, "hipblasLtMatmulDescCreate", static_cast<void**>(nullptr), 2, 0));
  say("hipblasLtMatmulDescDestroy(null) = %d", call(lt, "hipblasLtMatmulDescDestroy", static_cast<void*>(nullptr)));
  call(lt, "hipblasLtMatmulDescCreate", &desc, 2, 0);
  const unsigned char scalar_mode[16] = {};
  for (const int attribute : {0, 1, 2, 3, 4, 5, 6, 13, 14, 22}) sweep_attribute("MatmulDesc", desc, attribute, kValue, true);
  for (const int attribute : {31, 32}) sweep_attribute("MatmulDesc", desc, attribute, scalar_mode, true);
  for (const int attribute : {7, 8, 9, 10, 11, 12}) sweep_attribute("MatmulDesc", desc, attribute, kValue, false);
  for (const int attribute : kUnknown) sweep_attribute("MatmulDesc", desc, attribute, kValue, true);
  for (const int attribute : {31, 32})
    for (const int mode : {-1, 0, 2, 3, 4, 5, 4711})  // later releases take 1
      say("scale mode %d of %d = %d", mode, attribute, call(lt, "hipblasLtMatmulDescSetAttribute", desc, attribute, static_cast<const void*>(&mode), sizeof(mode)));
  for (const int epilogue : {0, 1, 2, 4, 32, 160, 164, 192, 208, 256, 512, 9999}) {
    int got = -1;
    size_t written = 0;
    const int set = call(lt, "hipblasLtMatmulDescSetAttribute", desc, 2, static_cast<const void*>(&epilogue), sizeof(epilogue));
    const int get = call(lt, "hipblasLtMatmulDescGetAttribute", desc, 2, static_cast<void*>(&got), sizeof(got), &written);
    say("epilogue %d: set %d, get %d, %d", epilogue, set, get, got);
  }
  for (const int operation : {0, 110, 111, 112, 113, 114})
    say("operation %d = %d", operation, call(lt, "hipblasLtMatmulDescSetAttribute", desc, 0, static_cast<const void*>(&operation), sizeof(operation)));
  say("hipblasLtMatmulDescDestroy = %d", call(lt, "hipblasLtMatmulDescDestroy", desc));
  // What a new one holds.
  call(lt, "hipblasLtMatmulDescCreate", &desc, 2, 0);
  for (const int attribute : {0, 1, 2, 3, 4, 5, 6, 13, 14, 22, 31, 32}) {
    uint64_t got = 0;
    size_t written = 0;
    const int status = call(lt, "hipblasLtMatmulDescGetAttribute", desc, attribute, static_cast<void*>(&got), sizeof(got), &written);
    say("a new product's attribute %d: %d, %zu bytes, %llx", attribute, status, written, static_cast<unsigned long long>(got));
  }
  call(lt, "hipblasLtMatmulDescDestroy", desc);
}

void layouts() {
  void* layout = nullptr;
  for (const int type : {-1, 0, 2, 14, 28, 1000, 4711})
    for (const long ld : {-1L, 0L, 2L, 64L}) {
      void* made = reinterpret_cast<void*>(8);
      const int status = call(lt, "hipblasLtMatrixLayoutCreate", &made, type, uint64_t{4}, uint64_t{0}, static_cast<int64_t>(ld));
      say("hipblasLtMatrixLayoutCreate(%d, 4, 0, %ld) = %d, %s", type, ld, status, made ? "something" : "null");
      if (status == 0) call(lt, "hipblasLtMatrixLayoutDestroy", made);
    }
  say("hipblasLtMatrixLayoutCreate(null) = %d", call(lt, "hipblasLtMatrixLayoutCreate", static_cast<void**>(nullptr), 0, uint64_t{4}, uint64_t{4}, int64_t{4}));
  say("hipblasLtMatrixLayoutDestroy(null) = %d", call(lt, "hipblasLtMatrixLayoutDestroy", static_cast<void*>(nullptr)));
  call(lt, "hipblasLtMatrixLayoutCreate", &layout, 0, uint64_t{4}, uint64_t{4}, int64_t{4});
  for (const int attribute : {0, 1}) sweep_attribute("MatrixLayout", layout, attribute, kValue, true);
  for (const int attribute : {2, 3, 4, 5, 6}) sweep_attribute("MatrixLayout", layout, attribute, kValue, false);
  for (const int attribute : kUnknown) sweep_attribute("MatrixLayout", layout, attribute, kValue, true);
  say("hipblasLtMatrixLayoutDestroy = %d", call(lt, "hipblasLtMatrixLayoutDestroy", layout));
}

void preferences() {
  void* preference = nullptr;
  say("hipblasLtMatmulPreferenceCreate(null) = %d", call(lt, "hipblasLtMatmulPreferenceCreate", static_cast<void**>(nullptr)));
  say("hipblasLtMatmulPreferenceDestroy(null) = %d", call(lt, "hipblasLtMatmulPreferenceDestroy", static_cast<void*>(nullptr)));
  say("hipblasLtMatmulPreferenceCreate = %d", call(lt, "hipblasLtMatmulPreferenceCreate", &preference));
  for (const int attribute : {0, 1, -1, 4711}) sweep_attribute("MatmulPreference", preference, attribute, kValue, true, kWholeSizes);
  say("hipblasLtMatmulPreferenceDestroy = %d", call(lt, "hipblasLtMatmulPreferenceDestroy", preference));
}

void without_handle() {
  void *desc = nullptr, *layout = nullptr, *preference = nullptr, *none = nullptr;
  call(lt, "hipblasLtMatmulDescCreate", &desc, 2, 0);
  call(lt, "hipblasLtMatrixLayoutCreate", &layout, 0, uint64_t{4}, uint64_t{4}, int64_t{4});
  call(lt, "hipblasLtMatmulPreferenceCreate", &preference);
  hipblasLtMatmulHeuristicResult_t result;
  int found = -1, version = -1;
  say("heuristic(no handle) = %d, %d found",
      call(lt, "hipblasLtMatmulAlgoGetHeuristic", none, desc, layout, layout, layout, layout, preference, 1, &result, &found), found);
  const float one = 1;
  float data[16] = {};
  say("matmul(no handle) = %d",
      call(lt, "hipblasLtMatmul", none, desc, &one, data, layout, data, layout, &one, data, layout, data, layout, none, none, size_t{0}, none));
  say("hipblasLtDestroy(null) = %d", call(lt, "hipblasLtDestroy", none));
  say("hipblasLtGetVersion(null) = %d", call(lt, "hipblasLtGetVersion", none, &version));
  call(lt, "hipblasLtMatmulPreferenceDestroy", preference);
  call(lt, "hipblasLtMatrixLayoutDestroy", layout);
  call(lt, "hipblasLtMatmulDescDestroy", desc);
}

void runtime() {
  int count = -1, device = -1, version = -1;
  say("hipGetDeviceCount = %d, %d", call(hip, "hipGetDeviceCount", &count), count);
  say("hipGetDeviceCount(null) = %d", call(hip, "hipGetDeviceCount", static_cast<int*>(nullptr)));
  say("hipGetDevice = %d", call(hip, "hipGetDevice", &device));
  say("hipSetDevice(0) = %d", call(hip, "hipSetDevice", 0));
  say("hipGetLastError = %d", call(hip, "hipGetLastError"));
  static hipDeviceProp_t properties;
  say("hipGetDevicePropertiesR0600 = %d", call(hip, "hipGetDevicePropertiesR0600", &properties, 0));
  say("hipDeviceGetAttribute = %d", call(hip, "hipDeviceGetAttribute", &version, static_cast<int>(hipDeviceAttributeWarpSize), 0));
  say("hipRuntimeGetVersion(null) = %d", call(hip, "hipRuntimeGetVersion", static_cast<int*>(nullptr)));
  void* pointer = nullptr;
  say("hipMalloc = %d", call(hip, "hipMalloc", &pointer, size_t{16}));
  say("hipDeviceSynchronize = %d", call(hip, "hipDeviceSynchronize"));
  for (const int error : {0, 1, 2, 100, 101, 400, 500, 600, 801, 4711}) {
    say("hipGetErrorName(%d) = %s", error, find<const char* (*)(int)>(hip, "hipGetErrorName")(error));
    say("hipGetErrorString(%d) = %s", error, find<const char* (*)(int)>(hip, "hipGetErrorString")(error));
  }
}

void* open(const char* path) {
  void* opened = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (!opened) std::fprintf(stderr, "%s\n", dlerror());
  return opened;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  hip = open(argv[1]);
  lt = open(argv[2]);
  if (!hip || !lt) return 2;
  if (argc > 3 && std::strcmp(argv[3], "create") == 0) {
    void* handle = nullptr;
    const int status = call(lt, "hipblasLtCreate", &handle);  // ends the process where no device is
    say("hipblasLtCreate = %d", status);
    return 0;
  }
  runtime();
  descriptors();
  layouts();
  preferences();
  without_handle();
  return 0;
}
