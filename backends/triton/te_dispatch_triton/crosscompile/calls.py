# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operator calls that between them launch every kernel in every form: regions of the conformance kit's spaces, at sizes
of a transformer's layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from te_dispatch.conformance import arranging
from te_dispatch.conformance.arranging import Arranged
from te_dispatch.conformance.case import Case
from te_dispatch.conformance.maker import DTYPES, Sketch
from te_dispatch.conformance.space import Arguments, Space, find
from te_dispatch.conformance.transfer import tensors
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.core.scopes import MANAGER
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.activation import KINDS

#: Axes that a space's functions read and that it does not have.
_FREE = frozenset({"dims"})
_FP8 = "e4m3fn e5m2 e4m3fnuz e5m2fnuz"
_CASTS = "current block_1d block_2d mxfp8 nvfp4"
_LAYER = "8192x4096"


class Region(NamedTuple):
    """Combinations of values of some axes of a space; the others have their first value.

    Attributes:
        family: under which its calls are compiled.
        space: ``operator.space``.
        axes: axis -> values, which need not be the kit's: sizes are those of layers.
        sliced: whether operands are slices of wider tensors.
    """

    family: str
    space: str
    axes: Mapping[str, tuple[str, ...]]
    sliced: bool = False


def _of(family: str, space: str, **axes: str) -> Region:
    """Values of an axis are separated by spaces."""
    return Region(family, space, {name: tuple(values.split()) for name, values in axes.items()})


def _cast(family: str, space: str, **axes: str) -> tuple[Region, ...]:
    """Every kind of cast, with delayed scaling to other encodings, too."""
    return (
        _of(family, space, cast=_CASTS, usage="row both", **axes),
        _of(family, space, cast="delayed", encoding="e4m3fn e4m3fnuz e5m2", usage="row both", **axes),
    )


_WIDE, _GELU = "8192x16384", "gelu swiglu"
_ACTIVATION = (
    _of("activation", "activation_fwd.plain", shape=_WIDE, kind=" ".join(KINDS)),
    _of("activation", "activation_bwd.plain", shape=_WIDE, kind=" ".join(KINDS), dbias="yes"),
    *_cast("activation", "activation_fwd.plain", shape=_WIDE, kind=_GELU),
    *_cast("activation", "activation_bwd.plain", shape=_WIDE, kind=_GELU, dbias="no yes"),
    _of("activation", "activation_fwd.plain", shape=_WIDE, record="delayed", x_encoding="e4m3fn e4m3fnuz"),
    _of(
        "activation", "activation_bwd.plain", shape=_WIDE, record="delayed", x_encoding="e4m3fn e4m3fnuz",
        cast="delayed", encoding="e5m2", usage="both", dbias="yes",
    ),
)  # fmt: skip

_LONG = {"shape": "2x1024x1024", "heads": "32/8", "dtype": "bf16"}


def _attention(space: str, **axes: str) -> tuple[Region, ...]:
    """Both directions, without the gradient of a bias where there is none."""
    forward = {name: value for name, value in axes.items() if name != "dbias"}
    return _of("attention", f"attention_fwd.{space}", **forward), _of("attention", f"attention_bwd.{space}", **axes)


_ATTENTION = (
    *_attention("plain", **_LONG, mask="causal", dims="64/64 128/128 192/128 256/256"),
    *_attention("plain", **{**_LONG, "dtype": "fp16"}, mask="causal", dims="128/128"),
    *_attention("plain", **{**_LONG, "dtype": "fp32"}, mask="causal", dims="64/64 128/128 256/256"),
    # Outputs, and their gradients, may be wider than the operands.
    *_attention("plain", **_LONG, mask="causal", dims="128/128 256/256", out="fp32"),
    *_attention("plain", **_LONG, mask="none", dims="128/128"),
    _of("attention", "attention_fwd.plain", **_LONG, dims="128/128", max_logit="yes"),
    *_attention("masked", **_LONG, mask="causal_bottom_right", window="512:0", dims="128/128"),
    *_attention("masked", **_LONG, mask="arbitrary", attn_mask="b1qk", dims="128/128"),
    *_attention("masked", **_LONG, mask="padding_causal", dims="128/128"),
    *_attention("scored", **_LONG, bias="alibi", dims="128/128", dbias="no"),
    *_attention("scored", **_LONG, bias="post_scale", bias_shape="1h", bias_dtype="bf16", dims="128/128"),
    *_attention("scored", **_LONG, softcap="20.0", softmax="learnable", dims="128/128", dbias="no"),
    *_attention("dropped", **_LONG, dropout="0.1", dims="128/128"),
    *_attention(
        "ragged", layout="thd", lengths="1000+1048", mask="padding_causal", heads="32/8", dtype="bf16", dims="128/128",
        dbias="no",
    ),
    _of(
        "attention", "attention_fwd.paged", page="64", kv_lengths="absent", shape="2x1x1024", heads="32/8",
        dtype="bf16", dims="128/128",
    ),
)  # fmt: skip

_PRODUCT, _GROUPS = "2048x1024x1024", {"rows": "2048+2048+2048+2048", "columns": "1024x1024"}
_OCP, _FNUZ = "e4m3fn+e4m3fn e5m2+e4m3fn", "e4m3fnuz+e4m3fnuz e5m2fnuz+e4m3fnuz"


def _records(scaling: str, **axes: str) -> Region:
    return _of("gemm", "gemm.quantized", shape=_PRODUCT, scaling=scaling, **axes)


_GEMM = (
    _of("gemm", "gemm.plain", shape=_PRODUCT, dtype="bf16 fp16 fp32", layout="NT NN TN"),
    _of("gemm", "gemm.plain", shape="257x131x129"),
    _of("gemm", "gemm.epilogue", shape=_PRODUCT, layout="TN", epilogue="bgrad_a", out="added", out_dtype="fp32"),
    _of("gemm", "gemm.epilogue", shape=_PRODUCT, epilogue="gelu", bias="same", cast="both-delayed"),
    _of("gemm", "gemm.epilogue", shape=_PRODUCT, epilogue="dgelu"),
    _records("current+current", encodings=f"{_OCP} {_FNUZ}", layout="NT", accumulation="fast"),
    _records("current+current", encodings=f"{_OCP} {_FNUZ}", layout="TN", accumulation="split"),
    _records("block_1d+block_2d", encodings="e4m3fn+e4m3fn e4m3fnuz+e4m3fnuz", layout="NT"),
    _records("block_1d+block_1d", encodings="e5m2+e4m3fn", layout="TN"),
    _records("mxfp8+mxfp8", layout="NT TN"),
    _records("nvfp4+nvfp4", layout="NT"),
    _of("gemm", "grouped_gemm.plain", **_GROUPS),
    _of("gemm", "grouped_gemm.plain", **_GROUPS, layout="TN", splits="device"),
    _of("gemm", "grouped_gemm.quantized", **_GROUPS, cast="current"),
)

_NORM = (
    *(_of("norm", f"{name}_fwd.plain", shape=_LAYER, dtype="bf16 fp32") for name in ("layernorm", "rmsnorm")),
    *_cast("norm", "layernorm_fwd.residual", shape=_LAYER),
    _of("norm", "rmsnorm_fwd.residual", shape=_LAYER, dtype="bf16 fp32"),
    _of("norm", "layernorm_fwd.residual", shape="64x65536"),
    *(
        _of("norm", f"{name}_bwd.plain", shape=f"8192x512 {_LAYER} 64x65536", add="none same")
        for name in ("layernorm", "rmsnorm")
    ),
)

_POSITION = (
    _of("position", "rope_fwd.dense", shape="256x4x32x128", interleaved="no yes"),
    _of("position", "rope_bwd.dense", shape="256x4x32x128", interleaved="no yes"),
    _of("position", "rope_fwd.dense", shape="256x4x32x128", rotated="half", offsets="yes"),
    _of("position", "rope_fwd.thd", lengths="100+156", heads="32x128", dtype="fp32"),
)

_HALF = {"dtype": "bf16", "shape": _LAYER}
_QUANTIZE = (
    _of("quantize", "quantize.delayed", **_HALF, encoding=_FP8, usage="row both"),
    _of("quantize", "quantize.delayed", **_HALF, encoding=_FP8, usage="both", common="yes"),
    _of("quantize", "quantize.delayed", shape=_LAYER, dtype="fp16 fp32", usage="column"),
    _of("quantize", "quantize.delayed", dtype="bf16", shape="1031x1037", usage="both"),
    _of("quantize", "quantize.current", **_HALF, usage="row both", power_of_two="no yes"),
    _of("quantize", "quantize.current", **_HALF)._replace(sliced=True),
    _of("quantize", "quantize.block", **_HALF, cast="block_1d block_2d", usage="row column both"),
    _of("quantize", "quantize.block", dtype="bf16", shape="8190x4096", cast="block_1d block_2d", usage="both"),
    _of("quantize", "quantize.block", shape=_LAYER, encoding="e4m3fnuz e5m2", power_of_two="no"),
    _of("quantize", "quantize.mxfp8", **_HALF, usage="row column both"),
    _of("quantize", "quantize.mxfp8", dtype="bf16", shape="1031x1037", encoding="e4m3fnuz e5m2", common="yes"),
    _of("quantize", "quantize.nvfp4", **_HALF, usage="row column both"),
    _of("quantize", "quantize.nvfp4", **_HALF, cast="nvfp4_2d", usage="both"),
    *(_of("quantize", f"quantize.{kind}", **_HALF, out="flag_clear") for kind in ("delayed", "current")),
    _of("quantize", "quantize_dbias.plain", **_HALF, cast="delayed", encoding="e5m2", bias_dtype="bf16 fp32"),
    _of("quantize", "quantize_dbias.plain", **_HALF, cast="block_1d mxfp8", bias_dtype="bf16 fp32"),
    _of("quantize", "compute_amax.plain", shape=_LAYER, dtype="bf16 fp16 fp32"),
    _of("quantize", "update_delayed_scales.plain", histories="several one", algorithm="max most_recent"),
)

_RECORDS = "block_1d block_2d mxfp8 nvfp4"
_READ = {"shape": "512x1024"}
_FORMS = (
    _of("quantize_forms", "dequantize.plain", **_READ, encoding=_FP8, usage="row"),
    _of("quantize_forms", "dequantize.plain", **_READ, usage="column"),
    _of("quantize_forms", "dequantize.plain", **_READ, scaling=_RECORDS, usage="row column", dtype="fp32"),
    _of("quantize_forms", "dequantize.plain", **_READ, scaling=_RECORDS, usage="row", layout="other"),
    _of("quantize_forms", "relayout_scales.plain", **_READ, scaling=_RECORDS),
    _of("quantize_forms", "transpose_quantized.plain", **_READ, scaling="tensor block_2d", usage="row"),
    _of("quantize_forms", "transpose_quantized.plain", shape="512x1025", usage="row"),
    _of("quantize_forms", "convert_encoding.plain", **_READ, scaling="block_1d", encoding="e4m3fn e5m2fnuz", count="0"),
    _of("quantize_forms", "pad_rows.plain", k="4096", dtype="uint8 bf16 fp32"),
    *(
        _of("quantize_forms", f"{name}.plain", shard="middle in_row beyond", block="0 128", dtype="bf16 fp32", **axes)
        for name, axes in (("partial_amax", {}), ("partial_cast", {"encoding": "e4m3fn e5m2fnuz"}))
    ),
    *(
        _of("quantize_forms", f"{name}.plain", cast=f"delayed {_CASTS}", usage="both", dtype="bf16", **axes)
        for name, axes in (
            ("split_quantize", {"splits": "1024+512+512", "k": "4096"}),
            ("multi_tensor_quantize", {"shapes": "mixed"}),
        )
    ),
)

_LOGITS = "2x4x64x128 2x4x64x2048 2x4x64x8192 2x4x64x16384 2x4x64x40000"
_SOFTMAX = (
    *(_of("softmax", f"softmax_{way}.plain", dtype="bf16", shape=_LOGITS, scale="0.125") for way in ("fwd", "bwd")),
    _of("softmax", "softmax_fwd.plain", dtype="fp16", shape="2x4x64x2048 2x4x64x40000", mask="random"),
    _of("softmax", "softmax_fwd.plain", dtype="fp32", shape="2x4x64x2048 2x4x64x40000", causal="yes"),
)

_ROUTED = {"shape": "8192x4096 8192x32", "top_k": "2", "experts": "60"}
_LISTS = "4096x4096+4096"
_STEP = {"shapes": _LISTS, "noop": "0"}
_TRAINING = (
    _of("training", "dropout_add_fwd.dropped", shape=_LAYER, dtype="bf16 fp32", bias="fp32 bf16"),
    _of("training", "dropout_add_bwd.plain", shape=_LAYER, dtype="bf16 fp32"),
    _of("training", "dropout_add_fwd.plain", shape="8192x100", dtype="fp16", residual="no", bias="fp32 bf16"),
    _of("training", "multi_tensor_adam.plain", **_STEP, dtype="bf16", grads="bf16", master="yes", adam_w="yes"),
    _of("training", "multi_tensor_adam.plain", **_STEP),
    _of("training", "multi_tensor_l2norm.plain", shapes=f"{_LISTS} 7*40", dtype="bf16 fp32", per_tensor="no yes"),
    _of("training", "multi_tensor_scale.plain", shapes=f"{_LISTS} 7*40", dtype="bf16 fp32", noop="0"),
    _of("training", "moe_permute.plain", **_ROUTED, dtype="bf16", probs="fp32", index="int32 int64"),
    _of("training", "moe_unpermute.plain", **_ROUTED, dtype="bf16", probs="fp32"),
    _of("training", "moe_unpermute_bwd.plain", **_ROUTED, dtype="bf16", grads="bf16", probs="fp32"),
    _of("training", "moe_unpermute.plain", **_ROUTED, dtype="fp16", probs="bf16"),
    _of("training", "moe_unpermute_bwd.plain", **_ROUTED, dtype="fp16", grads="bf16", probs="bf16"),
    _of("training", "moe_unpermute.plain", shape="8192x4096", top_k="12", experts="60", dtype="fp16"),
)

REGIONS: tuple[Region, ...] = (
    *_ACTIVATION, *_ATTENTION, *_GEMM, *_NORM, *_POSITION, *_QUANTIZE, *_FORMS, *_SOFTMAX, *_TRAINING,
)  # fmt: skip


class Call(NamedTuple):
    """A call of an operator.

    Attributes:
        name: of its case.
        operator: of it.
        arguments: of which nothing is ever touched; of a backward without what its forward saves.
        forward: of a backward that reads what its forward saves: the forward's arguments.
    """

    name: str
    operator: Operator
    arguments: Arguments
    forward: Arguments | None


def families() -> tuple[str, ...]:
    return tuple(sorted({region.family for region in REGIONS}))


def calls(family: str) -> Iterator[Call]:
    """The calls of a family, each as it is made."""
    for region in REGIONS:
        if region.family == family:
            operator, _, name = region.space.partition(".")
            space = find(operator, name)
            for chosen in itertools.product(*region.axes.values()):
                yield _call(space, dict(zip(region.axes, chosen)), region.sliced)


def _call(space: Space, chosen: Mapping[str, str], sliced: bool) -> Call:
    unknown = set(chosen) - {axis.name for axis in space.axes} - _FREE
    if unknown:
        raise ValueError(f"{space.id} has no axis {sorted(unknown)[0]!r}")
    values = {axis.name: axis.values[0] for axis in space.axes} | dict(chosen)
    if not space.valid(values):
        raise ValueError(f"{space.id} has no case with {chosen}")
    case = Case.of(space.operator, space.name, values)
    arguments = space.make(values, Blank(case, MANAGER))
    if sliced:
        arguments = Arranged(arguments, OPERATORS[space.operator].memory, arranging.sliced).arguments
    shown = ",".join(f"{name}={value}" for name, value in chosen.items())
    forward = None if space.forward is None else space.forward(arguments)
    return Call(f"{space.id}[{shown}]", OPERATORS[space.operator], arguments, forward)


class Blank(Sketch):
    """Makes arguments that hold nothing: sizes of layers take no memory as long as nobody touches them."""

    def tensor(self, *shape: int, dtype: str = "fp32", values: str = "normal") -> torch.Tensor:
        return torch.empty(shape, dtype=DTYPES[dtype])

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, low, dtype=dtype)

    def boolean(self, *shape: int, share: float = 0.5) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bool)

    def quantized(self, x: torch.Tensor, quantizer: Quantizer, usage: str = "both") -> Quantized:
        return _real(super().quantized(x, quantizer, usage))

    def laid_out(self, x: Quantized, scale_layout: str) -> Quantized:
        return _real(super().laid_out(x, scale_layout))

    def reference(self, operator: str) -> Any:
        return _Shaped(OPERATORS[operator])


def _real(x: Quantized) -> Quantized:
    """A record in place of what an operator's shape function gives, which host code does not know."""
    return Quantized(**{name: getattr(x, name) for name in Quantized.__slots__})


class _Shaped(NamedTuple):
    """Stands for an implementation: gives results of the operator's shapes."""

    operator: Operator

    def call(self, arguments: Mapping[str, Any]) -> Any:
        made = self.operator.shape(**arguments)
        for _, tensor in tensors(made):
            if tensor.dtype in (torch.int32, torch.int64):
                tensor.zero_()  # rows, which an index reads
        return made
