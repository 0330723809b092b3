// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Gradients of activations, with or without a cast and bias gradients: those of bf16.
#include "quantize/cast_source.cuh"

namespace ted {

void cast_backward(const Queue& queue, const SourceArguments& source, const CastArguments& arguments) {
  if (source.dtype != kBFloat16) return cast_backward_other(queue, source, arguments);
  require_count("x", source.rows, source.columns);
  const bool flat = (source.kind & kGated) == 0 && row_wise_only(arguments);
  with_backward_source<kOfBFloat16, kApart>(flat ? flattened(source) : source,
    [&](auto s) { cast_source(queue, s, arguments); });
}

}  // namespace ted
