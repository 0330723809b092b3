// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What prepared calls (common/prepared.h) are made of; apart from them, because kernels know nothing of Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ted {

// One argument as it waits to be passed.
union Word {
  int64_t integer;
  double real;
};

}  // namespace ted
