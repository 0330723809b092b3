# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the conformance kit is tested with. This module holds manifests: data only.

``loopback`` hands every call on to the torch backend and gives the results back unchanged, in memory of
`te_dispatch.ops.alloc`: the kit must find nothing. ``faulty`` does the same until one of its known mistakes is switched
on (`te_dispatch_faulty.catalogue`): the kit must then find it. So do ``narrow``, which claims primitives only, and
``single``, which claims one operator. ``varied`` computes in another way that the contracts allow, where one is
switched on (`te_dispatch_faulty.variations`): the kit must find nothing.

``TE_DISPATCH_FAULT=name`` switches one on in a process, `te_dispatch_faulty.binding.fault` in a block.
"""

import dataclasses

from te_dispatch.core.manifest import API_VERSION, CANONICAL, Implementation, Manifest
from te_dispatch.core.requirements import Condition, OneOf
from te_dispatch_torch.implementations import IMPLEMENTATIONS

_ON_CUDA = OneOf("device.type", "cuda")
_SOUND = {one.name: one for one in IMPLEMENTATIONS if _ON_CUDA not in one.requires}

#: Implementations of a name of their own -> the torch backend's that they hand on to; all others have its name.
OTHER_NAMES = {
    "native_gemm": "emulated_gemm",
    "product": "matmul",
    "fp8_product": "emulated_gemm",
    "saving_attention": "unfused_attention",
    "sparing_attention": "unfused_attention",
    "shared_attention_bwd": "unfused_attention_bwd",
}

#: Those of `faulty` that plan calls.
PLANNED = ("matmul", "quantize", "rmsnorm_fwd", "softmax_fwd")


def _derived(backend: str, name: str, **changes: object) -> Implementation:
    """The torch backend's entry in another one. Results are copied, so that it is no plain PyTorch any more."""
    sound = _SOUND[OTHER_NAMES.get(name, name)]
    target = f"te_dispatch_faulty.binding:{backend}__{name}"
    traits = sound.traits - {"plain_torch"}
    return dataclasses.replace(sound, **{"name": name, "target": target, "traits": traits, **changes})  # type: ignore[arg-type]


def _spoiled(name: str, saved_format: str = "faulty.own/1", **changes: object) -> Implementation:
    """One that a fault may be switched on in; forwards and backwards of other backends do not go with it."""
    if name in PLANNED:
        changes["plan"] = f"te_dispatch_faulty.plans:faulty__{name}"
    if _SOUND[OTHER_NAMES.get(name, name)].saved_format != CANONICAL:
        changes["saved_format"] = saved_format
    return _derived("faulty", name, **changes)


LOOPBACK = Manifest(
    name="loopback",
    api_version=API_VERSION,
    description="The torch backend, called through another one. For tests.",
    implementations=tuple(_derived("loopback", name) for name in _SOUND),
)

FAULTY = Manifest(
    name="faulty",
    api_version=API_VERSION,
    description="The torch backend, with one known fault at a time. For tests.",
    implementations=(
        *(_spoiled(name) for name in _SOUND if not name.startswith(("sdpa", "varlen")) and name != "softmax_bwd"),
        # The torch backend does not claim it, because it does not hold on GPUs. On CPUs it does, and faults break it.
        _spoiled("softmax_bwd", claims=_SOUND["softmax_bwd"].claims | {"batch_invariant"}),
        # Judged as hardware is: an emulation's sums are exact.
        _spoiled("native_gemm", traits=frozenset({"fused"})),
        # Two forwards, one backward: what one forward saves and the other does not, that backward must not read.
        _spoiled("saving_attention", "faulty.shared/1"),
        _spoiled("sparing_attention", "faulty.shared/1"),
        _spoiled("shared_attention_bwd", "faulty.shared/1"),
    ),
)

_NO_CAST = (OneOf("quantizer", None),)
_PER_TENSOR = (
    OneOf("a.scaling", "tensor"),
    OneOf("b.scaling", "tensor"),
    OneOf("a.dtype", "e4m3fn", "e5m2"),
    OneOf("b.dtype", "e4m3fn", "e5m2"),
    OneOf("epilogue", None),
    OneOf("out_quantizer", None),
)


def _primitive(backend: str, name: str, *requires: Condition) -> Implementation:
    sound = _SOUND[OTHER_NAMES.get(name, name)]
    return _derived(backend, name, requires=(*sound.requires, *requires))


NARROW = Manifest(
    name="narrow",
    api_version=API_VERSION,
    description="Primitives of the torch backend, with one known fault at a time. For tests.",
    implementations=(
        _primitive("narrow", "product", OneOf("epilogue", None), OneOf("out_quantizer", None)),
        _primitive("narrow", "fp8_product", *_PER_TENSOR),
        _primitive("narrow", "layernorm_fwd", *_NO_CAST, OneOf("residual", False)),
        _primitive("narrow", "layernorm_bwd", OneOf("add", False)),
        _primitive("narrow", "activation_fwd", *_NO_CAST, OneOf("x.scaling", "none")),
        _primitive("narrow", "activation_bwd", *_NO_CAST, OneOf("x.scaling", "none"), OneOf("with_dbias", False)),
        _primitive("narrow", "softmax_fwd"),
        _primitive("narrow", "softmax_bwd"),
        _primitive(
            "narrow", "quantize", OneOf("quantizer", "delayed", "current"),
            OneOf("quantizer.encoding", "e4m3fn", "e5m2"), OneOf("out", False),
        ),
        _primitive("narrow", "dequantize", OneOf("x.scaling", "tensor"), OneOf("x.dtype", "e4m3fn", "e5m2")),
        _primitive("narrow", "rope_fwd", OneOf("cu_seqlens", False)),
        _primitive("narrow", "rope_bwd", OneOf("cu_seqlens", False)),
    ),
)  # fmt: skip

SINGLE = Manifest(
    name="single",
    api_version=API_VERSION,
    description="FP8 products of the torch backend, with one known fault at a time. For tests.",
    implementations=(_primitive("single", "fp8_product", *_PER_TENSOR),),
)

VARIED = Manifest(
    name="varied",
    api_version=API_VERSION,
    description="The torch backend, computed in other ways that its contracts allow. For tests.",
    implementations=tuple(
        dataclasses.replace(_derived("varied", name), claims=sound.claims & {"deterministic"}, saved_format=(
            CANONICAL if sound.saved_format == CANONICAL else "varied.own/1"))
        for name, sound in _SOUND.items() if not name.startswith(("sdpa", "varlen"))
    ),
)  # fmt: skip

MANIFESTS = {manifest.name: manifest for manifest in (LOOPBACK, FAULTY, NARROW, SINGLE, VARIED)}
