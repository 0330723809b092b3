# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantizers: frozen descriptions of one cast. They hold no algorithm; `ops.quantize` carries them out.

Every quantizer has four class-level or instance strings: `kind` (which algorithm), `encoding`, and what the result's
`Quantized.scaling` and `Quantized.scale_layout` will be: `scaling`, `scale_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Union, get_args

from te_dispatch.numerics.encodings import encoding as find_encoding
from te_dispatch.numerics.quantized import CANONICAL_SCALES

if TYPE_CHECKING:
    import torch


#: Values of `kind`.
KINDS = ("delayed", "current", "block", "mxfp8", "mxfp8_2d", "nvfp4", "nvfp4_rht", "nvfp4_4over6")

#: Values of `NVFP4FourOverSixQuantizer.scale_max` and `NVFP4FourOverSixQuantizer.error`.
SCALE_MAXIMA = (256, 448)
ERRORS = ("MAE", "MSE")


@dataclass(frozen=True)
class _Cast:
    """What all quantizers share.

    Attributes:
        encoding: target encoding.
        common: clamp at the encoding's `common_max` and write -0 as +0, so that OCP and FNUZ devices produce equal
            codes (policy ``fp8_portability: common``).
        max_value: derived: where the cast saturates, and the numerator of computed scales.
    """

    encoding: str = "e4m3fn"
    common: bool = False
    max_value: float = field(init=False, repr=False, default=0.0)

    kind: ClassVar[str] = ""
    scaling: ClassVar[str] = ""
    scale_layout = CANONICAL_SCALES  # not annotated: a field of one kind, after its others

    def __post_init__(self) -> None:
        found = find_encoding(self.encoding)
        object.__setattr__(self, "max_value", found.common_max if self.common else found.max)

    @property
    def keeps_negative_zero(self) -> bool:
        return find_encoding(self.encoding).negative_zero and not self.common


@dataclass(frozen=True, eq=False)
class DelayedQuantizer(_Cast):
    """Per-tensor cast with a scale from earlier steps: q = encode(RN32(fp32(x) * scale)).

    Attributes:
        scale: float32 (1,), in force for this cast.
        amax: float32 (1,), max-accumulated with max |x| (NaN ignored, Inf kept); None to record nothing.
    """

    scale: torch.Tensor = None  # type: ignore[assignment]  # required; dataclass fields after defaulted ones
    amax: torch.Tensor | None = None

    kind: ClassVar[str] = "delayed"
    scaling: ClassVar[str] = "tensor"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is None:
            raise TypeError("DelayedQuantizer needs scale, a float32 tensor of shape (1,)")


@dataclass(frozen=True)
class CurrentQuantizer(_Cast):
    """Per-tensor cast with this tensor's own scale: scale = RN32(max_value / max(amax, epsilon)).

    An amax of 0 (with epsilon 0), Inf or NaN gives scale 1; an infinite scale becomes the largest float32.

    Attributes:
        power_of_two: clear the scale's mantissa, rounding it down to a power of two.
        epsilon: floor under the amax.
    """

    power_of_two: bool = False
    epsilon: float = 0.0

    kind: ClassVar[str] = "current"
    scaling: ClassVar[str] = "tensor"


@dataclass(frozen=True)
class BlockQuantizer(_Cast):
    """One scale per block: 1x128 along the contracted dimension (`two_d` False), or 128x128 tiles (`two_d` True).

    The scale of a block follows `CurrentQuantizer`'s rule with the block's amax. Edge blocks are partial.

    Attributes:
        two_d: 128x128 tiles, for weights; else 1x128, for activations and gradients.
        power_of_two, epsilon: as in `CurrentQuantizer`; power of two by default.
        scale_layout: how the scales of both copies shall lie (`te_dispatch.ops.relayout_scales`): ``canonical``, or as
            libraries of block-scaled products read them, ``gemm_1d`` of 1x128 blocks and ``gemm_2d`` of tiles, padded
            with zeros.
    """

    two_d: bool = False
    power_of_two: bool = True
    epsilon: float = 0.0
    scale_layout: str = CANONICAL_SCALES

    kind: ClassVar[str] = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        of_gemm = "gemm_2d" if self.two_d else "gemm_1d"
        if self.scale_layout not in (CANONICAL_SCALES, of_gemm):
            raise ValueError(
                f"scale_layout: got {self.scale_layout!r} with {self.scaling}, expected {CANONICAL_SCALES} or {of_gemm}"
            )

    @property
    def scaling(self) -> str:  # type: ignore[override]
        return "block_2d" if self.two_d else "block_1d"


@dataclass(frozen=True)
class MXFP8Quantizer(_Cast):
    """OCP microscaling: 32 elements share an E8M0 scale, its exponent = ceil(log2(RN32(amax / max_value))).

    amax NaN gives exponent code 0xFF, Inf 0xFE, 0 gives 0x00; otherwise the biased exponent is clamped to
    [0x00, 0xFE]. Values are encode(RN32(x * 2^-exponent)).
    """

    kind: ClassVar[str] = "mxfp8"
    scaling: ClassVar[str] = "mxfp8"


@dataclass(frozen=True)
class MXFP8TileQuantizer(_Cast):
    """`MXFP8Quantizer` with one E8M0 scale for each 32x32 tile, for weights. Edge tiles are partial.

    The two copies hold the same codes. Each has its usual scales of MXFP8, with a tile's exponent repeated for its 32
    rows or columns, so that products and `dequantize` read the record as any other of mxfp8 scaling.
    """

    kind: ClassVar[str] = "mxfp8_2d"
    scaling: ClassVar[str] = "mxfp8"


@dataclass(frozen=True)
class NVFP4Quantizer(_Cast):
    """E2M1 values, an e4m3fn scale per 16 and one float32 scale per tensor, all rounded to nearest even.

    S = 448 * 6 / amax(tensor); block scale code b = e4m3fn(amax(block) * S / 6); q = e2m1(x * S / decode(b));
    global_scale_inv = RN32(1 / S). `two_d` shares one block scale among 16x16 values (weights).
    """

    encoding: str = "e2m1"
    two_d: bool = False

    kind: ClassVar[str] = "nvfp4"
    scaling: ClassVar[str] = "nvfp4"


@dataclass(frozen=True)
class NVFP4HadamardQuantizer(_Cast):
    """`NVFP4Quantizer` with 1x16 blocks, whose column-wise copy is of the matrix rotated along its rows.

    Each block of 16 rows of a column is multiplied by the random Hadamard matrix (`te_dispatch.numerics.hadamard`), and
    the result is cast with an S of its own, of the rotated matrix's amax. The 16 products with 1/4 are exact, their sum
    is in fp32, in any order; where the tensor that is cast is bfloat16, the sum is rounded to bfloat16. Making a
    column-wise copy needs a number of rows that 16 divides.
    """

    encoding: str = "e2m1"

    kind: ClassVar[str] = "nvfp4_rht"
    scaling: ClassVar[str] = "nvfp4_rht"


@dataclass(frozen=True)
class NVFP4FourOverSixQuantizer(_Cast):
    """`NVFP4Quantizer` whose blocks map their amax to 6 or to 4, whichever leaves the smaller error.

    S = scale_max * 6 / amax(tensor), u = x * S, a = amax(block) * S / 6, every operation rounded to float32. A block
    has two candidates, b6 = e4m3fn(a) and b4 = e4m3fn(1.5 * a). Each gives values q = e2m1(u / decode(b)), 0 where b
    reads 0, and errors e = q * decode(b) - u. With E the sum of |e| or of e^2 over the block, b4 is taken where
    E4 < E6, else b6, so a NaN leaves its block at b6. Sums add halves, in float32: of 16 elements each to that 8
    further, then 4, 2 and 1; of a tile first the elements of each row, then the rows. Tiles are chosen once, for both
    copies.

    Formulas: Cook et al., Four Over Six, arXiv 2512.02010, and Transformer Engine's map-to-4 and map-to-6 candidates.

    Attributes:
        two_d: 16x16 values share a scale, and a choice (weights).
        scale_max: block scales of b6 reach up to it, 256 or 448. 256 leaves 1.5 times as much to b4; beyond 448 b4
            saturates.
        error: ``MAE`` sums |e|, ``MSE`` e^2.
    """

    encoding: str = "e2m1"
    two_d: bool = False
    scale_max: int = 256
    error: str = "MAE"

    kind: ClassVar[str] = "nvfp4_4over6"
    scaling: ClassVar[str] = "nvfp4"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_max not in SCALE_MAXIMA:
            raise ValueError(f"scale_max: got {self.scale_max!r}, expected 256 or 448")
        if self.error not in ERRORS:
            raise ValueError(f"error: got {self.error!r}, expected MAE or MSE")


Quantizer = Union[
    DelayedQuantizer, CurrentQuantizer, BlockQuantizer, MXFP8Quantizer, MXFP8TileQuantizer, NVFP4Quantizer,
    NVFP4HadamardQuantizer, NVFP4FourOverSixQuantizer,
]  # fmt: skip

#: How many elements of the contracted dimension share a scale, by `Quantized.scaling`.
BLOCK = {"block_1d": 128, "block_2d": 128, "mxfp8": 32, "nvfp4": 16, "nvfp4_rht": 16}

#: The classes, by kind.
QUANTIZERS: dict[str, Any] = {q.kind: q for q in get_args(Quantizer)}

_STATELESS = {kind: q for kind, q in QUANTIZERS.items() if q is not DelayedQuantizer}


def options_of(quantizer: Quantizer) -> dict[str, Any] | None:
    """A quantizer as plain data for `quantizer_of`; None for one of delayed scaling, whose state belongs to others."""
    if quantizer.kind not in _STATELESS:
        return None
    return {"kind": quantizer.kind, **{f.name: getattr(quantizer, f.name) for f in fields(quantizer) if f.init}}


def quantizer_of(options: dict[str, Any]) -> Quantizer:
    """The quantizer that `options_of` described."""
    given = {name: value for name, value in options.items() if name != "kind"}
    found: Quantizer = _STATELESS[options["kind"]](**given)
    return found
