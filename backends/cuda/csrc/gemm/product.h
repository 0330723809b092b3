// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// One product as the library takes it: its descriptors, the algorithm, and the call.
//
// Sizes and strides here are row-major, as everywhere in te_dispatch. The library is column-major, so it is shown the
// transposed problem: its A is our b, its B our a, its D, (n, m), our out.
#pragma once

#include "gemm/cublaslt_api.h"

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ted::gemm {

struct ProductSpec {
  int device;
  int64_t m, n, k;
  bool a_turned, b_turned;   // a lies as (k, m); b lies as (n, k)
  int64_t lda, ldb, ldd;     // elements between rows
  int32_t a_type, b_type, d_type;  // lt::DataType
  int32_t c_type;            // d_type, or what stands for it where D has 8 bits
  int a_alignment, b_alignment, d_alignment;
  bool scaled;               // both operands have scales
  int32_t a_scale_mode, b_scale_mode;
  int32_t epilogue = lt::kEpilogueDefault;
  int32_t bias_type = -1;    // also of a bias gradient
  int bias_alignment = 16;
  bool d_cast = false;  // scaled and measured by the library
  bool accumulate = false;
  bool fast = false, tf32 = false;
};

struct ProductOperands {
  const void* a;
  const void* b;
  const void* a_scale;
  const void* b_scale;
  void* d;
  const void* d_scale;
  void* d_amax;
  const void* bias;
  void* workspace;
  float alpha;
};

struct Candidate {
  lt::Algorithm algorithm;
  int64_t workspace;
};

class Product {
 public:
  explicit Product(const ProductSpec& spec);
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  // Up to `count` algorithms, the library's favourite first; empty where it has none.
  std::vector<Candidate> candidates(int count) const;
  // The library's status of the last `candidates` that found none.
  const std::string& refusal() const { return refusal_; }
  // Takes an algorithm; false where the library does not accept it for this product.
  bool accept(const lt::Algorithm& algorithm);
  void take(const Candidate& candidate) { chosen_ = candidate; }
  int64_t workspace() const { return chosen_.workspace; }
  const Candidate& taken() const { return chosen_; }

  void run(cudaStream_t stream, const ProductOperands& o);

 private:
  template <class T>
  void set(int32_t attribute, const T& value) const;
  void point(int32_t attribute, const void*& known, const void* address) const;

  using Owned = std::unique_ptr<void, lt::Status (*)(void*)>;
  static Owned layout(int32_t type, int64_t rows, int64_t columns, int64_t stride);

  ProductSpec spec_;
  lt::Handle handle_;
  Owned desc_, a_, b_, c_, d_;
  Candidate chosen_{};
  // Addresses that stand in the descriptor: most calls come with the last one's, from PyTorch's cache.
  const void *a_scale_ = nullptr, *b_scale_ = nullptr, *bias_ = nullptr, *d_scale_ = nullptr, *d_amax_ = nullptr;
  mutable std::string refusal_;
  std::mutex mutex_;  // pointers are written into the descriptor before each call
};

// Tile, stages, splits of an algorithm, in words.
std::string describe(const lt::Algorithm& algorithm);

}  // namespace ted::gemm
