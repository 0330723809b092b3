// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/bindings.h"
#include "position/rope.h"

static ted::Bindings position(+[](pybind11::module_& m) { m.def("rope", &ted::rope); });
