# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The portable backend: every operator in PyTorch's own operations. This module is its manifest: data only."""

from te_dispatch.core.manifest import API_VERSION, Manifest
from te_dispatch_torch.archs import ARCHS
from te_dispatch_torch.implementations import IMPLEMENTATIONS

MANIFEST = Manifest(
    name="torch",
    api_version=API_VERSION,
    description="PyTorch's own operations on any device.",
    devices={kind: f"te_dispatch_torch.probe:{kind}" for kind in ("cpu", "cuda", "xpu", "mps")},
    archs=ARCHS,
    implementations=IMPLEMENTATIONS,
    doctor="te_dispatch_torch.probe:doctor",
    unavailable="te_dispatch_torch.probe:unavailable",
)
