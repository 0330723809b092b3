// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Gradients of activations, with or without a cast and bias gradients: those of fp32 and fp16.
#include "quantize/cast_source.cuh"

namespace ted {

void cast_backward_other(const Queue& queue, const SourceArguments& source, const CastArguments& arguments) {
  require_count("x", source.rows, source.columns);
  const bool flat = (source.kind & kGated) == 0 && row_wise_only(arguments);
  with_backward_source<kOfOthers, kApart>(flat ? flattened(source) : source,
    [&](auto s) { cast_source(queue, s, arguments); });
}

}  // namespace ted
