// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Casts with one scale per tensor, and the bookkeeping of scales.
#pragma once

#include "cast/source_arguments.h"
#include "cast/tensor.h"
#include "common/prepared_word.h"
#include "common/queue.h"

#include <array>
#include <vector>

namespace ted {

// What a native cast does in one call: the amax of current scaling, the cast, column sums.
struct CastArguments {
  TensorCast cast;   // its `maxima` is an amax given by the caller, or null
  float* workspace;  // kMaxima floats where the amax is to be found, then sums_rows(rows) x columns where dbias is
  bool find_amax;
  void* dbias;       // (columns,) of dbias_dtype, or null
  int dbias_dtype;
};

// Throws std::invalid_argument with the argument's name.
void check_cast(const SourceArguments& source, const CastArguments& cast);

// Each runs one form of source (source_arguments.h).
void cast_plain(const Queue& queue, const SourceArguments& source, const CastArguments& cast);
void cast_forward(const Queue& queue, const SourceArguments& source, const CastArguments& cast);
void cast_backward(const Queue& queue, const SourceArguments& source, const CastArguments& cast);
void cast_backward_other(const Queue& queue, const SourceArguments& source, const CastArguments& cast);

// target[c] = the sum of partial[.., c] over `rows` rows, in one fixed order. early: common/launch.cuh.
void launch_sums(const Queue& queue, const float* partial, int64_t rows, int64_t columns, void* target, int dtype,
                 bool early = false);

// *out = max |x|: NaN ignored, 0 for nothing.
void compute_amax(int device, uintptr_t stream, uintptr_t x, int dtype, int64_t count, uintptr_t out);

// The end of a step of delayed scaling. An entry per run of columns with one largest value: (history, scale, amax or 0,
// length of the history, columns of the history, first column, columns of the run), and that value * 2^-margin.
void update_delayed_scales(int device, uintptr_t stream, const std::vector<std::array<uintptr_t, 7>>& entries,
                           const std::vector<float>& numerators, bool most_recent);
// The same as a prepared call: device, stream, most_recent, then each entry and its number.
void update_prepared_scales(const Word* words, size_t count);

}  // namespace ted
