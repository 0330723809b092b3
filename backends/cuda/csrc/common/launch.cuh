// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// A kernel that starts before its predecessor on the stream is done (programmatic dependent launch, CUDA C++
// Programming Guide; from sm_90 on): its blocks take the place of those that have finished, fetch what the predecessor
// does not write, and wait. The predecessor is a kernel of the same call, so that nothing of the caller's is overtaken.
#pragma once

#include "common/queue.h"

namespace ted {

// In the predecessor: once all its blocks have come here or are done, the next kernel's may start.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// In the next kernel: until the predecessor is done and what it wrote can be seen. Every thread that reads of it.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// A launch; `early` says that the predecessor calls let_next_start() and this kernel wait_for_previous().
template <class... Expected, class... Given>
void launch(const Queue& queue, bool early, void (*kernel)(Expected...), unsigned blocks, dim3 threads,
            Given&&... given) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = threads;
  config.stream = queue.stream();
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early && queue.limits().major >= 9 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Given>(given)...), "launch");
}

}  // namespace ted
