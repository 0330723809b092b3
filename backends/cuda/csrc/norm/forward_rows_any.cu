// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "norm/forward_rows.cuh"

namespace ted::norm {

template void launch_rows<kAnything>(const Queue&, const Forward&, int, int, unsigned, int);

}  // namespace ted::norm
