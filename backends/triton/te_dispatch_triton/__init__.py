# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The Triton backend: one source for NVIDIA and AMD GPUs. This module is its manifest: data only."""

from te_dispatch.core.manifest import API_VERSION, Manifest
from te_dispatch_triton.archs import ARCHS
from te_dispatch_triton.implementations import IMPLEMENTATIONS

MANIFEST = Manifest(
    name="triton",
    api_version=API_VERSION,
    description="Triton kernels for NVIDIA and AMD GPUs.",
    devices={kind: f"te_dispatch_triton.probe:{kind}" for kind in ("cuda", "cpu")},
    archs=ARCHS,
    implementations=IMPLEMENTATIONS,
    doctor="te_dispatch_triton.doctor:doctor",
    unavailable="te_dispatch_triton.probe:unavailable",
    emulators={f"amd:{arch}": "te_dispatch_triton.emulation:emulator" for arch in ("gfx942", "gfx950")},
)
