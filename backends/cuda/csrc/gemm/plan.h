// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// One gemm, planned once and run many times: the library's product, and which of our own steps go before and after.
//
// Direct: the library does all of it in one launch. Staged: it writes an fp32 product, which finish() turns into the
// outputs. Either may need operands copied with zeros at their edges, and block scales in the library's layout.
#pragma once

#include "gemm/product.h"
#include "gemm/steps.h"

#include <memory>

namespace ted::gemm {

enum Layout : int { kNT = 0, kNN = 1, kTN = 2 };
enum Epilogue : int { kNoEpilogue = 0, kGelu = 1, kDGelu = 2, kBgradA = 3, kBgradB = 4 };

// Of block scales: they lie as the library wants them (gemm_1d, gemm_2d, swizzled_32x4x4), not canonical; their address
// is no multiple of 16 bytes.
enum ScaleFlags : int { kLaidOut = 1, kUnaligned = 2 };

struct OperandKind {
  int type;       // element type (steps.h)
  int scaling;    // Scaling
  int scales;      // ScaleFlags
  int alignment;   // of the address: a power of two of bytes, 256 at most
  int64_t stride;  // elements between rows
};

// What is asked for. `layout` says how the given copies lie: codes come contracted along their last dimension (NT),
// whatever the operator's layout was, except for mxfp8, whose column-wise copies are not transposed.
struct Problem {
  int device;
  int layout;
  int64_t m, n, k;
  OperandKind a, b;
  int out_type;  // nominal where out_cast is given
  int out_cast;  // kNone, or a cast's code
  int out_alignment;
  bool accumulate;
  int bias_type;
  int bias_alignment;
  int epilogue;
  int aux_type;  // of the aux that is read or written, nominal where aux_cast is given
  int aux_cast;
  bool tf32;
  bool fast;
};

// Addresses of one call.
struct Operands {
  const void* a;
  const void* b;
  const void* a_scale;
  const void* b_scale;
  const float* a_global;  // fp4: the scale of the whole operand
  const float* b_global;
  void* out;
  Cast out_cast;
  const void* bias;
  void* aux;
  const float* aux_scale;  // of codes that are read
  Cast aux_cast;
  void* dbias;
  void* workspace;
  float alpha;
};

class Plan {
 public:
  // chosen: an algorithm to use instead of the library's favourite, where it still accepts it.
  // Throws lt::Refused, with the library's status, where it has none.
  Plan(const Problem& problem, const lt::Algorithm* chosen);

  const Problem& problem() const { return problem_; }
  int64_t workspace() const { return workspace_; }
  bool direct() const { return product_ != nullptr && !staged_; }
  const Product* product() const { return product_.get(); }
  // Makes later runs use another algorithm of this plan's candidates.
  void take(const Candidate& candidate);

  void run(const Queue& queue, const Operands& o);

 private:
  // Where in the workspace a step keeps its data.
  struct Copy {
    bool needed = false;
    int64_t rows = 0, row_bytes = 0, source_stride = 0, target_rows = 0, stride = 0, offset = 0;
  };
  struct Scales {
    bool needed = false;
    ScaleJob job{};
    int64_t offset = 0;
    int32_t mode = lt::kScalar32F;
  };

  bool attempt(bool staged, bool copied, const lt::Algorithm* chosen);
  bool fusible() const;
  void fuse(ProductSpec& spec) const;
  ProductSpec specify(bool staged, bool copied);
  Copy copy_of(const OperandKind& operand, int64_t rows, int64_t columns, int64_t target_rows, int64_t target_columns) const;
  Scales scales_of(const OperandKind& operand, int64_t rows, int64_t target_rows, bool tiles) const;
  void reserve_workspace();

  void require_addresses(const Operands& o) const;
  void multiply(const Queue& queue, const Operands& o, uint8_t* base);
  void finish_product(const Queue& queue, const Operands& o, uint8_t* base);
  void sum_operand(const Queue& queue, const Operands& o, uint8_t* base);

  Problem problem_;
  std::unique_ptr<Product> product_;
  std::string refusal_;
  bool staged_ = false;      // an fp32 product is finished by our kernel
  bool in_place_ = false;    // that product is written to out
  bool fused_sums_ = false;  // sums of an operand are the library's
  int64_t m_ = 0, n_ = 0, k_ = 0;  // of the library's product, padded
  Copy a_copy_, b_copy_;
  Scales a_scales_, b_scales_;
  int64_t z_ = 0, partials_ = 0, measured_ = 0;  // offsets
  int64_t workspace_ = 0;
};

}  // namespace ted::gemm
