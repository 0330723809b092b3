# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The manifest of the example's chip, tide:n1, which PyTorch calls npu."""

from te_dispatch.core.facts import Arch
from te_dispatch.core.manifest import API_VERSION, Implementation, Manifest
from te_dispatch.core.requirements import OneOf

_FP32 = tuple(OneOf(f"{name}.dtype", "fp32") for name in ("x", "gamma"))
_ON_N1 = OneOf("device.vendor", "tide")
_CLAIMS = frozenset({"deterministic"})

MANIFEST = Manifest(
    name="npu",
    api_version=API_VERSION,
    description="The example of a device of PyTorch's own kind",
    vendors=("tide",),
    devices={"npu": "te_dispatch_npu.probe:probe"},  # PyTorch's device type, as the extension renamed it
    archs={"tide": {"n1": Arch(warp_size=1)}},
    unavailable="te_dispatch_npu.probe:unavailable",
    doctor="te_dispatch_npu.probe:doctor",
    implementations=(
        Implementation(
            "rmsnorm_fwd@1",
            "rmsnorm_fwd",
            "te_dispatch_npu.norm:rmsnorm_fwd",
            (_ON_N1, *_FP32, OneOf("out_dtype", None, "fp32"), OneOf("quantizer", None), OneOf("residual", False)),
            claims=_CLAIMS | {"batch_invariant"},
        ),
        Implementation(
            "rmsnorm_bwd@1",
            "rmsnorm_bwd",
            "te_dispatch_npu.norm:rmsnorm_bwd",
            (_ON_N1, *_FP32, OneOf("dy.dtype", "fp32")),
            claims=_CLAIMS,
        ),
    ),
)
