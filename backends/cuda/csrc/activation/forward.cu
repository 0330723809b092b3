// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Activations, with or without a cast.
#include "quantize/cast_source.cuh"

namespace ted {

void cast_forward(const Queue& queue, const SourceArguments& source, const CastArguments& arguments) {
  require_count("x", source.rows, source.columns);
  const bool flat = (source.kind & kGated) == 0 && row_wise_only(arguments);
  with_forward_source<kApart>(flat ? flattened(source) : source,
                              [&](auto s) { cast_source<false>(queue, s, arguments); });
}

}  // namespace ted
