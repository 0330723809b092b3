// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Dynamic shared memory beyond what every launch may have.
#pragma once

#include "common/queue.h"

namespace ted {

// A launch of `kernel` on the queue's device may ask for so many bytes from now on. The driver is told once.
void allow_shared_memory(const Queue& queue, const void* kernel, int64_t bytes, const char* operation);

}  // namespace ted
