// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Kernels that begin while the one before them in the stream still runs (CUDA C++ Programming Guide, "Programmatic
// dependent launch"), from sm_90 on: what costs time before the first dependent access is hidden. Only for kernels of
// one operator: what they read before `wait_for_previous` must be older than the kernel before them.
#pragma once

#include "common/queue.h"

#include <utility>

namespace ted {

// The next kernel may begin once all blocks of this one have called this, or ended.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when the kernel before this one has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <class... Parameters, class... Arguments>
void launch_overlapping(const Queue& q, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
                        Arguments&&... arguments) {
  cudaLaunchAttribute overlapping{};
  overlapping.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlapping.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = q.stream();
  config.attrs = &overlapping;
  config.numAttrs = q.limits().major >= 9 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), "launch");
}

}  // namespace ted
