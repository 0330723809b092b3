// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// AMD's names: from AMD's headers where the build has them (HOST_LIBRARY_AMD_HEADERS), else from declarations.h. With
// the headers, a function here that differs from AMD's declaration of it is a compile error.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef HOST_LIBRARY_AMD_HEADERS
#include <hip/hip_runtime_api.h>
#include <hipblaslt/hipblaslt.h>
#else
#include "declarations.h"
#endif

#define HOST_EXPORT extern "C" __attribute__((visibility("default")))
