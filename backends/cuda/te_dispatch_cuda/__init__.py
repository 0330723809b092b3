# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The native backend for NVIDIA GPUs: CUDA kernels, cuBLASLt, cuDNN. This module is its manifest: data only."""

from te_dispatch.core.manifest import API_VERSION, Manifest
from te_dispatch_cuda.archs import ARCHS
from te_dispatch_cuda.implementations import IMPLEMENTATIONS

MANIFEST = Manifest(
    name="cuda",
    api_version=API_VERSION,
    description="CUDA kernels, cuBLASLt and cuDNN for NVIDIA GPUs.",
    vendors=("nvidia",),
    devices={"cuda": "te_dispatch_cuda.probe:cuda"},
    archs=ARCHS,
    implementations=IMPLEMENTATIONS,
    doctor="te_dispatch_cuda.doctor:doctor",
    unavailable="te_dispatch_cuda.probe:unavailable",
)
