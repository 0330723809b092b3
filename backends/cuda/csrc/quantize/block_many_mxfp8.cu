// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "quantize/block_many.cuh"

namespace ted {

void many_mxfp8_casts(const Queue& queue, const ManyCasts& many) { many_casts<kMXFP8>(queue, many); }

}  // namespace ted
