# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What this backend offers, as data: one module per operator family."""

from te_dispatch.core.manifest import Implementation
from te_dispatch_rocm.implementations import aiter, gemm

IMPLEMENTATIONS: tuple[Implementation, ...] = (*gemm.IMPLEMENTATIONS, *aiter.IMPLEMENTATIONS)
