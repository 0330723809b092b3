// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// One matrix product, planned once and run many times: the library's descriptors and the algorithm that it chose.
//
// Sizes and strides are row-major, as everywhere in te_dispatch. The library is column-major, so it is shown the
// transposed problem: its A is our b, its B our a, its D, (n, m), our out.
#pragma once

#include "gemm/hipblaslt_api.h"

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ted_rocm::gemm {

// Element types: dtypes from 0, encodings from kCodes. Must match te_dispatch_rocm/codes.py.
constexpr int kNone = -1;
constexpr int kCodes = 16;
enum ElementType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum Encoding : int { kE4M3 = 0, kE5M2 = 1, kE4M3Fnuz = 2, kE5M2Fnuz = 3 };
enum Scaling : int { kUnscaled = 0, kTensor = 1, kMxfp8 = 2 };
enum Epilogue : int { kNoEpilogue = 0, kGelu = 1, kDGelu = 2, kBgradA = 3, kBgradB = 4 };

struct Problem {
  int device;
  int64_t m, n, k;
  bool a_turned, b_turned;  // a lies as (k, m); b lies as (n, k)
  int64_t lda, ldb;         // elements between rows
  int a_type, b_type;
  int scaling;  // of both
  int out_type;
  bool accumulate;
  int bias_type;  // of the bias, or of the bias gradient
  int epilogue;
  int aux_type;
  bool tf32;
  int64_t workspace_limit;  // bytes

  // All of it, as the key of a cache.
  std::string packed() const;
};

// Addresses of one call.
struct Operands {
  const void* a;
  const void* b;
  const void* a_scale;
  const void* b_scale;
  void* out;
  const void* bias;  // or where the bias gradient is written
  void* aux;
  void* workspace;
  float alpha;
};

struct Candidate {
  lt::Algorithm algorithm;
  int64_t workspace;
};

class Plan {
 public:
  // chosen: the algorithm to use if the library still lists it, in place of its favourite; may be null.
  // Throws lt::Refused, with the library's status, where it has none, and std::invalid_argument for unknown codes.
  Plan(const Problem& problem, const lt::Algorithm* chosen);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const Problem& problem() const { return problem_; }
  int64_t workspace() const { return chosen_.workspace; }
  const Candidate& taken() const { return chosen_; }
  // Up to `count` algorithms, the library's favourite first; empty where it has none.
  std::vector<Candidate> candidates(int count) const;
  // Makes later runs use another of the candidates.
  void take(const Candidate& candidate) { chosen_ = candidate; }

  void run(hip::Stream stream, const Operands& o);

 private:
  template <class T>
  void set(int32_t attribute, const T& value) const;
  void point(int32_t attribute, const void*& known, const void* address) const;
  void describe(bool tf32);
  bool choose(const lt::Algorithm* wanted);
  void require_addresses(const Operands& o) const;

  using Owned = std::unique_ptr<void, lt::Status (*)(void*)>;
  static Owned layout(int32_t type, int64_t rows, int64_t columns, int64_t stride);

  Problem problem_;
  lt::Handle handle_;
  Owned desc_, a_, b_, d_;
  Candidate chosen_{};
  mutable std::string refusal_;
  // Addresses that stand in the descriptor: most calls come with the last one's, from PyTorch's cache.
  const void *a_scale_ = nullptr, *b_scale_ = nullptr, *bias_ = nullptr, *aux_ = nullptr;
  std::mutex mutex_;  // pointers are written into the descriptor before each call
};

// Whether two algorithms are the same one.
bool same(const lt::Algorithm& first, const lt::Algorithm& second);
// An algorithm in words.
std::string describe(const lt::Algorithm& algorithm);

}  // namespace ted_rocm::gemm
