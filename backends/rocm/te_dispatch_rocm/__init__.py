# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The native backend for AMD GPUs: matrix products by hipBLASLt. This module is its manifest: data only."""

from te_dispatch.core.manifest import API_VERSION, Manifest
from te_dispatch_rocm.archs import ARCHS
from te_dispatch_rocm.implementations import IMPLEMENTATIONS

MANIFEST = Manifest(
    name="rocm",
    api_version=API_VERSION,
    description="hipBLASLt for AMD GPUs.",
    vendors=("amd",),
    devices={"cuda": "te_dispatch_rocm.probe:cuda", "cpu": "te_dispatch_rocm.probe:cpu"},
    archs=ARCHS,
    implementations=IMPLEMENTATIONS,
    doctor="te_dispatch_rocm.doctor:doctor",
    unavailable="te_dispatch_rocm.probe:unavailable",
)
