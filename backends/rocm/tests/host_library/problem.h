// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// One product, read off its descriptors, and whether an algorithm for it exists.
#pragma once

#include "descriptors.h"

#include <string>
#include <vector>

namespace host {

// Columns first, as hipBLASLt: D (m, n) = op(A) (m, k) times op(B) (k, n).
struct Problem {
  int64_t m, n, k;
  bool a_turned, b_turned;
  hipDataType a_type, b_type, c_type, d_type, bias_type, aux_type;
  int64_t aux_ld;
  const Desc* desc;
  const Layout *a, *b, *c, *d;
};

// Which of its epilogue's parts a product has.
bool has_bias(int32_t epilogue);       // a bias is added
bool has_gelu(int32_t epilogue);       // GELU of the sum
bool has_relu(int32_t epilogue);
bool writes_aux(int32_t epilogue);     // what came before the activation is stored
bool is_gelu_backward(int32_t epilogue);  // the sum is multiplied by GELU's derivative at the auxiliary matrix
bool has_bias_gradient(int32_t epilogue);

// HIPBLAS_STATUS_SUCCESS and the problem, or the status of descriptors that contradict each other, with the reason on
// stderr. The real library is more lenient about sizes: what it lets through reads or writes outside of the matrices.
hipblasStatus_t read_problem(const Desc* desc, const Layout* a, const Layout* b, const Layout* c, const Layout* d, Problem* problem);

// Why no algorithm serves this problem on this chip; empty if one does.
std::string refusal(const std::string& arch, const Problem& problem);

// What an algorithm is made for. A product may run on an algorithm only if it has the same features.
uint32_t features(const Problem& problem);

}  // namespace host
