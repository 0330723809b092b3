// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Errors of the host side. std::invalid_argument reaches Python as ValueError, HipError as RuntimeError.
//
// The namespace is this backend's own: pybind11 keeps one table of C++ types for all modules of a process, by name, and
// the CUDA backend's may be there, too.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ted_rocm {

struct HipError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require_positive(const char* name, int64_t size) {
  if (size < 1) throw std::invalid_argument(std::string(name) + ": got " + std::to_string(size) + ", expected at least 1");
}

inline void require_pointer(const char* name, const void* pointer) {
  if (pointer == nullptr) throw std::invalid_argument(std::string(name) + ": got a null pointer");
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace ted_rocm
