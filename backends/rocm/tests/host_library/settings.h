// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What tests choose through the environment. Each variable is read whenever it is needed, so a test may change it in its
// own process.
//
//   HOST_HIP_DEVICES        an architecture per device, as gfx942,gfx950; default gfx942; empty: no device
//   HOST_HIP_VERSION        what hipRuntimeGetVersion answers; default 70253211
//   HOST_HIPBLASLT_VERSION  what hipblasLtGetVersion answers; default 100202, which stands for 1.2.2
//   HOST_HIPBLASLT_REFUSE   words of `kFeatures` in algorithms.cpp: products with these find no algorithm
//   HOST_HIPBLASLT_FAIL     hipblasLtMatmul returns HIPBLAS_STATUS_EXECUTION_FAILED if it is 1
//   HOST_HIPBLASLT_LOG      a file that gets a line for every product
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

namespace host {

inline std::string setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

inline std::vector<std::string> words(const std::string& text) {
  std::vector<std::string> found;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = text.find(',', begin) == std::string::npos ? text.size() : text.find(',', begin);
    if (end > begin) found.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return found;
}

}  // namespace host
