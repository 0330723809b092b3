// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Dropout with residual add, multi-tensor steps, mixture-of-experts. Contracts: te_dispatch/ops/training.py.
#pragma once

#include <cstdint>
#include <vector>

namespace ted {

// out = residual + dropout(x + bias), all contiguous, n elements in rows of `columns`; 0 for an absent residual, bias
// or, where nothing is dropped, rng_state (int64: seed, offset) and mask (bytes, 1 where kept).
void dropout_add_fwd(int device, uintptr_t stream, uintptr_t x, uintptr_t residual, uintptr_t bias, uintptr_t rng_state,
                     uintptr_t out, uintptr_t mask, int64_t n, int64_t columns, double dropout_p, int dtype,
                     int bias_dtype);

// dx = dy * (mask != 0) / (1 - p); dy itself where mask is 0.
void dropout_add_bwd(int device, uintptr_t stream, uintptr_t dy, uintptr_t mask, uintptr_t dx, int64_t n,
                     double dropout_p, int dtype);

// Lists of tensors: addresses and numbers of elements, in the lists' order; contiguous, or all of one entry in the same
// order of memory. noop_flag is a float, 0 for none.
using Addresses = std::vector<uintptr_t>;
using Counts = std::vector<int64_t>;
using Dtypes = std::vector<int>;

// One step. `master` is empty, or holds fp32 weights, of which params receive the rounded values.
void multi_tensor_adam(int device, uintptr_t stream, const Addresses& params, const Addresses& grads,
                       const Addresses& exp_avgs, const Addresses& exp_avg_sqs, const Addresses& master,
                       const Counts& counts, uintptr_t noop_flag, double lr, double beta1, double beta2, double eps,
                       double correction1, double correction2, double weight_decay, bool adam_w, int param_dtype,
                       int grad_dtype);

void multi_tensor_scale(int device, uintptr_t stream, const Addresses& inputs, const Addresses& outputs,
                        const Counts& counts, const Dtypes& input_dtypes, const Dtypes& output_dtypes, double scale,
                        uintptr_t noop_flag);

// Elements of a partial sum of multi_tensor_l2norm, whose `partials` holds one float for every so many elements of each
// tensor, begun ones counted.
constexpr int64_t kNormChunk = 32768;

void multi_tensor_l2norm(int device, uintptr_t stream, const Addresses& tensors, const Counts& counts,
                         const Dtypes& dtypes, uintptr_t partials, int64_t partial_count, uintptr_t out,
                         bool per_tensor);

// Bytes of moe_sort's workspace, which begins with how many rows are filled (int64).
int64_t moe_sort_workspace(int64_t choices);

// row_map (int32, one per choice): the place of each choice in a stable sort by expert, -1 where `indices` is negative
// or the place is `rows` or more. sorted_probs receives probs in that order, 0 behind the last; both may be 0.
void moe_sort(int device, uintptr_t stream, uintptr_t indices, uintptr_t probs, uintptr_t row_map,
              uintptr_t sorted_probs, uintptr_t workspace, int64_t choices, int64_t rows, bool wide_indices,
              int probs_dtype);

// target[row_map[t, c]] = source[t], rows of `bytes`; those from *filled (int64) on are zeroed. Follows
// moe_sort in its stream, and begins to read `source` while that still runs.
void moe_spread(int device, uintptr_t stream, uintptr_t source, uintptr_t row_map, uintptr_t filled, uintptr_t target,
                int64_t tokens, int64_t top_k, int64_t rows, int64_t bytes);

// out[t] = sum over c of x[row_map[t, c]] * probs[t, c], in fp32.
void moe_unpermute(int device, uintptr_t stream, uintptr_t x, uintptr_t row_map, uintptr_t probs, uintptr_t out,
                   int64_t tokens, int64_t top_k, int64_t rows, int64_t columns, int dtype, int probs_dtype);

// dinput[row_map[t, c]] = dy[t] * probs[t, c], other rows 0; dprobs[t, c] = sum(dy[t] * x[row_map[t, c]]). `filled`:
// workspace of `rows` bytes.
void moe_unpermute_bwd(int device, uintptr_t stream, uintptr_t dy, uintptr_t x, uintptr_t row_map, uintptr_t probs,
                       uintptr_t dinput, uintptr_t dprobs, uintptr_t filled, int64_t tokens, int64_t top_k,
                       int64_t rows, int64_t columns, int dy_dtype, int dtype, int probs_dtype);

}  // namespace ted
