// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The amax alone.
#include "cast/sources.cuh"
#include "cast/tensor.cuh"
#include "quantize/quantize.h"

namespace ted {

void compute_amax(int device, uintptr_t stream, uintptr_t x, int dtype, int64_t count, uintptr_t out) {
  const Queue queue(device, stream);
  require_size("x", count);
  require_pointer("x", pointer<void>(x), count, size_of(dtype));
  require_pointer("out", pointer<void>(out), 1, 4);
  check(cudaMemsetAsync(pointer<void>(out), 0, 4, queue.stream()), "compute_amax");
  if (count == 0) return;
  SourceArguments source{};
  source.dtype = dtype;
  source.rows = 1;
  source.columns = count;
  source.x = x;
  with_plain_source(source, [&](auto s) { launch_amax(queue, s, pointer<float>(out)); });
  queue.launched("compute_amax");
}

}  // namespace ted
