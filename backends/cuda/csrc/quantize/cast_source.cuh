// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// A cast as Python asks for it, for any source: one, two or three launches.
#pragma once

#include "cast/sources.cuh"
#include "cast/tensor.cuh"
#include "quantize/quantize.h"

namespace ted {

template <bool Sums = true, class Source>
void cast_source(const Queue& queue, const Source& source, const CastArguments& arguments) {
  TensorCast cast = arguments.cast;
  float* partial_sums = arguments.workspace;
  if (arguments.find_amax) {
    cast.maxima = arguments.workspace;
    cast.maxima_count = launch_maxima(queue, source, arguments.workspace, cast.noop);
    partial_sums += kMaxima;
  }
  if (arguments.dbias != nullptr) cast.sums = partial_sums;
  launch_cast<Sums>(queue, source, cast, arguments.find_amax);
  if (!Sums || arguments.dbias == nullptr) return;
  launch_sums(queue, cast.sums, sums_rows(source.rows()), source.columns(), arguments.dbias, arguments.dbias_dtype,
              source.rows() > 0);
}

// Where nothing depends on what a row is, a dense matrix is one long row.
inline bool row_wise_only(const CastArguments& arguments) {
  return arguments.cast.column == nullptr && arguments.dbias == nullptr;
}
inline SourceArguments flattened(SourceArguments source) {
  source.columns *= source.rows;
  source.rows = 1;
  source.stride = source.columns;
  return source;
}

}  // namespace ted
