// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Workspace that prepared calls keep: one for each stream, which its calls use one after the other. To allocate and
// free it in every call takes a quarter of a launch's time.
//
// A call holds the interpreter's lock while it launches its kernels, so those of several threads follow one another on
// a stream; and it holds a reference, so that memory which is replaced meanwhile goes to nobody before. What is kept is
// PyTorch's memory, allocated on that stream: freeing it is ordered as everything on the stream is.
#pragma once

#include "common/bindings.h"

#include <cstdint>

namespace ted {

// Bytes of the largest workspace that is kept, and streams that it is kept for: with more, all is freed.
constexpr int64_t kMostKept = 8 << 20;
constexpr size_t kMostStreams = 8;

// A new reference to a tensor of at least so many bytes, and its address; null where Python has an error set.
// empty: te_dispatch.ops.alloc.empty, which is asked where there is none or a smaller one.
PyObject* kept_workspace(int device, uintptr_t stream, int64_t bytes, PyObject* empty, PyObject* torch_device,
                         int64_t& address);

// Whether the stream is being captured into a graph, or may be.
bool capturing(uintptr_t stream);

// Frees what is kept, for all streams; bytes that were kept.
int64_t release_workspaces();

}  // namespace ted
