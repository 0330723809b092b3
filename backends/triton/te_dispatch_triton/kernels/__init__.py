# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The kernels: device code only, one module per concept. Host code beside it in the package launches them."""
