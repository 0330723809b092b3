// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Errors of the host side. std::invalid_argument reaches Python as ValueError, CudaError as RuntimeError.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

namespace ted {

struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void raise_cuda(cudaError_t error, const char* operation);

inline void check(cudaError_t error, const char* operation) {
  if (error != cudaSuccess) raise_cuda(error, operation);
}

// A pointer to `count` elements: not null where there are any, and aligned to the element's size.
inline void require_pointer(const char* name, const void* pointer, int64_t count, int64_t element_size) {
  if (count > 0 && pointer == nullptr)
    throw std::invalid_argument(std::string(name) + ": got a null pointer for " + std::to_string(count) + " elements");
  if (reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(element_size) != 0)
    throw std::invalid_argument(std::string(name) + ": got a pointer that is not a multiple of " +
                                std::to_string(element_size) + " bytes");
}

inline void require_size(const char* name, int64_t size) {
  if (size < 0) throw std::invalid_argument(std::string(name) + ": got " + std::to_string(size) + ", expected at least 0");
}

// rows * columns, which must fit 63 bits.
inline int64_t require_count(const char* name, int64_t rows, int64_t columns) {
  require_size(name, rows);
  require_size(name, columns);
  int64_t product = 0;
  if (__builtin_mul_overflow(rows, columns, &product))
    throw std::invalid_argument(std::string(name) + ": got " + std::to_string(rows) + " x " + std::to_string(columns) +
                                " elements, more than 63 bits count");
  return product;
}

// A grid dimension: the driver takes 2^31 - 1 along x.
inline unsigned grid_x(const char* name, int64_t blocks) {
  if (blocks > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument(std::string(name) + ": got " + std::to_string(blocks) + " blocks, more than a launch takes");
  return static_cast<unsigned>(blocks);
}

}  // namespace ted
