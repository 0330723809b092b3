// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Element types and encodings as the codes that cross the Python boundary (te_dispatch_cuda/codes.py), and the switch
// from a code to a type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>
#include <type_traits>

namespace ted {

enum Dtype : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

__host__ __device__ inline int64_t size_of(int dtype) { return dtype == kFloat32 ? 4 : 2; }

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<float>{}) or another element type. The name is the argument's, for the error.
template <class F>
void with_dtype(const char* name, int dtype, F&& f) {
  switch (dtype) {
    case kFloat32: return f(Type<float>{});
    case kBFloat16: return f(Type<__nv_bfloat16>{});
    case kFloat16: return f(Type<__half>{});
  }
  throw std::invalid_argument(std::string(name) + ": got dtype code " + std::to_string(dtype) + ", expected 0, 1 or 2");
}

// Calls f(std::true_type{}) or f(std::false_type{}).
template <class F>
void with_flag(bool flag, F&& f) {
  if (flag)
    f(std::true_type{});
  else
    f(std::false_type{});
}

// Encodings of te_dispatch.numerics.encodings. A cast's code adds kCommon where the quantizer says `common`.
enum Encoding : int { kE4M3 = 0, kE5M2 = 1, kE4M3FNUZ = 2, kE5M2FNUZ = 3, kE2M1 = 4, kCommon = 8 };

}  // namespace ted
