# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the gemm family.

Claims. `deterministic`: a tile is summed along K by one program, in an order that shapes and configuration decide; amax
is a maximum of integers. Not `batch_invariant`: block sizes depend on the number of rows.
"""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch.core.requirements import All, AnyOf, Condition, NoneOf, OneOf
from te_dispatch_triton.implementations.entry import FLOATS, FNUZ, OCP, ON_DEVICE, RANK, kernel

#: Casts whose scale is known before the product is; the others are done by `quantize`.
_CASTS: tuple[Condition, ...] = (
    OneOf("out_quantizer", None, "delayed"),
    OneOf("aux_quantizer", None, "delayed"),
    OneOf("aux.scaling", None, "none", "tensor"),
)
_PLAIN = (OneOf("a.dtype", *FLOATS), OneOf("b.dtype", *FLOATS), OneOf("a.scaling", "none"), OneOf("b.scaling", "none"))
#: Codes that the chip's FP8 units multiply.
_UNITS: tuple[Condition, ...] = (
    OneOf("device.fp8_matmul", True),
    AnyOf(
        All(OneOf("device.encodings", "e4m3fn"), OneOf("a.dtype", *OCP), OneOf("b.dtype", *OCP)),
        All(OneOf("device.encodings", "e4m3fnuz"), OneOf("a.dtype", *FNUZ), OneOf("b.dtype", *FNUZ)),
    ),
)
_TENSOR = (OneOf("a.scaling", "tensor"), OneOf("b.scaling", "tensor"))
_BLOCK = ("block_1d", "block_2d")
_BLOCKS = (OneOf("a.scaling", *_BLOCK), OneOf("b.scaling", *_BLOCK))
#: Microscaled codes whose scales the units apply.
_MICROSCALED: tuple[Condition, ...] = (
    AnyOf(
        *(
            All(
                OneOf("device.block_scaled_matmul", scaling),
                OneOf("a.scaling", scaling),
                OneOf("b.scaling", scaling),
                OneOf("a.dtype", *encodings),
                OneOf("b.dtype", *encodings),
            )
            for scaling, encodings in (("mxfp8", OCP), ("nvfp4", ("e2m1",)))
        )
    ),
)
_RECORDS = (NoneOf("a.scaling", "none"), NoneOf("b.scaling", "none"))
_EMULATED = frozenset({"emulated"})
_READS_BACK = frozenset({"deterministic"})
#: How rows are dealt to groups: known to the host; on the device with results of known shapes; on the device.
_DEALT: tuple[tuple[str, str, tuple[Condition, ...], frozenset[str]], ...] = (
    ("", "grouped_gemm", (OneOf("splits", "none", "host"),), ON_DEVICE),
    (
        "_on_device",
        "grouped_gemm_on_device",
        (OneOf("splits", "device"), AnyOf(OneOf("out", True), OneOf("layout", "TN"))),
        ON_DEVICE,
    ),
    (
        "_read_back",
        "grouped_gemm",
        (OneOf("splits", "device"), OneOf("out", False), OneOf("layout", "NT", "NN")),
        _READS_BACK,
    ),
)
_KINDS: tuple[tuple[str, tuple[Condition, ...], frozenset[str], int], ...] = (
    ("grouped_gemm", _PLAIN, frozenset(), RANK),
    ("fp8_grouped_gemm", (*_UNITS, *_TENSOR), frozenset(), RANK),
    ("block_grouped_gemm", (*_UNITS, *_BLOCKS), frozenset(), RANK),
    ("microscaled_grouped_gemm", _MICROSCALED, frozenset(), RANK),
    ("emulated_grouped_gemm", _RECORDS, _EMULATED, RANK + 100),
)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    kernel("gemm", "gemm:gemm", (*_PLAIN, *_CASTS)),
    kernel("gemm", "gemm:gemm_codes", (*_UNITS, *_TENSOR, *_CASTS), name="fp8_gemm"),
    kernel("gemm", "gemm:gemm_codes", (*_UNITS, *_BLOCKS, *_CASTS), name="block_gemm"),
    kernel("gemm", "gemm:gemm_codes", (*_MICROSCALED, *_CASTS), name="microscaled_gemm"),
    # Whatever no unit multiplies is decoded by the kernel.
    kernel(
        "gemm", "gemm:gemm_decoded", (*_RECORDS, *_CASTS), ON_DEVICE, "emulated_gemm", _EMULATED, rank=RANK + 100
    ),
    *(
        kernel(
            "grouped_gemm",
            f"gemm_grouped:{function}{'_decoded' if traits else ''}",
            (*requires, *dealt),
            claims,
            f"{name}{suffix}",
            traits,
            rank=rank,
        )
        for name, requires, traits, rank in _KINDS
        for suffix, function, dealt, claims in _DEALT
    ),
)  # fmt: skip
