// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Casts of tensors.
#include "quantize/cast_source.cuh"

namespace ted {

void cast_plain(const Queue& queue, const SourceArguments& source, const CastArguments& arguments) {
  require_count("x", source.rows, source.columns);
  const bool flat = source.stride == source.columns && row_wise_only(arguments);
  with_plain_source(flat ? flattened(source) : source, [&](auto s) { cast_source(queue, s, arguments); });
}

}  // namespace ted
