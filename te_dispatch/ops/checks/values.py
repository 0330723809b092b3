# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Checks of single arguments: tensors, records, quantizers, options. All raise before anything is written.

A message reads ``name: got X, expected Y``. Contents of tensors are looked at where that costs no synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from te_dispatch.numerics.encodings import FP8_ENCODINGS
from te_dispatch.numerics.hadamard import SIZE
from te_dispatch.numerics.quantized import CANONICAL_SCALES, NVFP4_SCALINGS, SCALINGS, Quantized
from te_dispatch.numerics.quantizers import (
    QUANTIZERS,
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    NVFP4HadamardQuantizer,
)
from te_dispatch.ops.shapes import USAGES, data_shapes, global_scale_shape, laid_out_shapes, rows_of

Operand = torch.Tensor | Quantized

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
F32 = (torch.float32,)
U8 = (torch.uint8,)
I32 = (torch.int32,)
I64 = (torch.int64,)
BOOL = (torch.bool,)
#: Of the parts of complex tensors: the only ones that PyTorch negates lazily (the imaginary part of a conjugate).
_PARTS = frozenset((torch.float16, torch.float32, torch.float64))

#: Scale layout -> the scalings it is defined for (`te_dispatch.ops.relayout_scales`).
SCALE_LAYOUTS = {
    CANONICAL_SCALES: SCALINGS,
    "gemm_1d": ("block_1d",),
    "gemm_2d": ("block_2d",),
    "swizzled_32x4x4": ("mxfp8", "nvfp4"),
}

#: Scaling -> its scale layouts.
_LAYOUTS_OF = {
    scaling: [layout for layout, scalings in SCALE_LAYOUTS.items() if scaling in scalings] for scaling in SCALINGS
}
_QUANTIZERS = tuple(QUANTIZERS.values())
_FP4 = ("e2m1",)
_BYTE_SCALES = frozenset(("mxfp8", *NVFP4_SCALINGS))
_ONE = torch.Size((1,))


def listed(words: Sequence[Any]) -> str:
    """``a, b or c``."""
    found = [str(word).removeprefix("torch.") for word in words]
    return " or ".join(filter(None, (", ".join(found[:-1]), found[-1])))


def kind_error(name: str, value: Any, expected: str) -> TypeError:
    text = f" {value!r}" if isinstance(value, (str, bool, int, float)) else ""
    return TypeError(f"{name}: got {'None' if value is None else type(value).__name__ + text}, expected {expected}")


def tensor(name: str, x: Any, dtypes: Sequence[torch.dtype] = FLOATS, device: torch.device | None = None) -> None:
    """A tensor of one of `dtypes`, on `device` if given."""
    if not isinstance(x, Tensor):
        raise kind_error(name, x, "a torch.Tensor")
    found = x.dtype
    if found not in dtypes:
        raise ValueError(f"{name}: got dtype {found}, expected {listed(dtypes)}")
    # Kernels read memory, which holds the other sign.
    if found in _PARTS and not is_dynamo_compiling() and x.is_neg():
        raise ValueError(f"{name}: got a lazily negated tensor, expected one with its own signs: call resolve_neg()")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: got device {x.device}, expected {device}, where the other arguments are")


def shape(name: str, x: Operand, expected: Sequence[int]) -> None:
    # Two tuples, usually, of which torch.Size is one.
    if x.shape != expected and tuple(x.shape) != tuple(expected):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {tuple(expected)}")


def shaped(
    name: str,
    x: Any,
    expected: Sequence[int],
    dtypes: Sequence[torch.dtype] = FLOATS,
    device: torch.device | None = None,
) -> None:
    tensor(name, x, dtypes, device)
    shape(name, x, expected)


def matrix(name: str, x: Any) -> None:
    """A float tensor (..., K)."""
    tensor(name, x)
    if x.ndim == 0:
        raise ValueError(f"{name}: got a tensor without dimensions, expected (..., K)")


def writable(name: str, x: torch.Tensor) -> None:
    """A tensor whose elements lie apart, so that each can be written."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
        raise ValueError(
            f"{name}: got strides {x.stride()} for shape {tuple(x.shape)}, expected memory of its own for every element"
        )


def scalar(name: str, x: Any, device: torch.device, dtypes: Sequence[torch.dtype] = F32) -> None:
    """One number on the device, (1,)."""
    tensor(name, x, dtypes, device)
    if x.shape != _ONE:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected (1,)")


def rng(rng_state: Any, device: torch.device) -> None:
    shaped("rng_state", rng_state, (2,), I64, device)


def one_of(name: str, value: Any, accepted: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise kind_error(name, value, f"one of {', '.join(accepted)}")
    if value not in accepted:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(accepted)}")


def dtype(name: str, value: Any) -> None:
    """None or a dtype that results can have."""
    if value is not None and value not in FLOATS:
        raise ValueError(f"{name}: got {value}, expected {listed(FLOATS)}")


def number(name: str, value: Any, least: float | None = None) -> None:
    # The usual kinds first: dynamo cannot tell what attributes a symbolic number has.
    if not isinstance(value, (int, float)) and (
        isinstance(value, (str, torch.Tensor)) or not hasattr(value, "__float__")
    ):
        raise kind_error(name, value, "a number")
    if least is not None and not value >= least:
        raise ValueError(f"{name}: got {value}, expected {least:g} or more")


def integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, torch.Tensor) or not hasattr(value, "__index__"):
        raise kind_error(name, value, "an int")
    if value < least:
        raise ValueError(f"{name}: got {value}, expected {least} or more")


def integers(name: str, values: Any, least: int = 0) -> None:
    if not isinstance(values, (list, tuple)):
        raise kind_error(name, values, "a list or tuple of ints")
    for i, value in enumerate(values):
        integer(f"{name}[{i}]", value, least)


def sequence(name: str, values: Any, count: int | None = None, per: str = "") -> None:
    """A list or tuple, of `count` entries if given, else of at least one."""
    if not isinstance(values, (list, tuple)):
        raise kind_error(name, values, "a list or tuple")
    if count is None and not values:
        raise ValueError(f"{name}: got an empty {type(values).__name__}, expected at least one entry")
    if count is not None and len(values) != count:
        raise ValueError(f"{name}: got {len(values)}, expected {count}, one per {per}")


def readable(x: torch.Tensor) -> bool:
    """Whether a tensor's contents can be looked at for free: real, on the host, outside a trace."""
    return x.is_cpu and x.__class__ is torch.Tensor and not torch.compiler.is_compiling()


def quantizer(name: str, value: Any, device: torch.device) -> None:
    """Any quantizer, with an encoding its kind can write and its state on `device`."""
    if value.__class__ not in _QUANTIZERS and not isinstance(value, _QUANTIZERS):  # eight comparisons
        raise kind_error(name, value, "one of te_dispatch.numerics.quantizers")
    accepted = _FP4 if value.scaling in NVFP4_SCALINGS else FP8_ENCODINGS
    if value.encoding not in accepted:
        raise ValueError(f"{name}: got encoding {value.encoding!r} with {value.kind}, expected {listed(accepted)}")
    if isinstance(value, DelayedQuantizer):
        scalar(name + ".scale", value.scale, device)
        if value.amax is not None:
            scalar(name + ".amax", value.amax, device)
    elif isinstance(value, (CurrentQuantizer, BlockQuantizer)):
        epsilon = value.epsilon
        if epsilon.__class__ is not float or not epsilon >= 0.0:  # else its name need not be built
            number(f"{name}.epsilon", epsilon, 0.0)


def cast(name: str, value: Any, usage: Any, device: torch.device) -> None:
    """The optional quantizer of a fused operator, and its usage."""
    one_of("usage", usage, USAGES)
    if value is not None:
        quantizer(name, value, device)


def rotatable(name: str, of: Sequence[int], value: Any, usage: str) -> None:
    """Of a quantizer that rotates blocks of 16 rows: a shape has whole blocks, where it makes the column-wise copy."""
    if isinstance(value, NVFP4HadamardQuantizer) and usage != "row" and (rows := rows_of(tuple(of))) % SIZE:
        raise ValueError(
            f"{name}: got {rows} rows with a Hadamard transform of the column-wise copy, expected a multiple of {SIZE}"
        )


def record(name: str, x: Any, device: torch.device | None = None) -> None:
    """A `Quantized` that is whole: known tags, at least one copy, each with data and scales of the right shapes."""
    if not isinstance(x, Quantized):
        raise kind_error(name, x, "a Quantized")
    if x.scaling not in SCALINGS:
        raise ValueError(f"{name}: got scaling {x.scaling!r}, expected one of {', '.join(SCALINGS)}")
    accepted = _FP4 if x.scaling in NVFP4_SCALINGS else FP8_ENCODINGS
    if x.encoding not in accepted:
        raise ValueError(f"{name}: got encoding {x.encoding!r} with {x.scaling} scaling, expected {listed(accepted)}")
    layouts = _LAYOUTS_OF[x.scaling]
    if x.scale_layout not in layouts:
        raise ValueError(
            f"{name}: got scale layout {x.scale_layout!r} with {x.scaling} scaling, expected {listed(layouts)}"
        )
    if len(x.shape) == 0:
        raise ValueError(f"{name}: got a record without dimensions, expected (..., K)")
    dtype(f"{name}.dtype", x.dtype)
    if device is not None and x.device != device:
        raise ValueError(f"{name}: got device {x.device}, expected {device}, where the other arguments are")
    if x.row_data is None and x.col_data is None:
        raise ValueError(f"{name}: has neither a row-wise nor a column-wise copy, expected one")
    _copies(name, x)


def _copies(name: str, x: Quantized) -> None:
    scaling, device = x.scaling, x.device
    data, scales = data_shapes(x.shape, scaling), laid_out_shapes(x.shape, scaling, x.scale_layout)
    scale_dtypes = U8 if scaling in _BYTE_SCALES else F32
    if x.row_data is not None:
        shaped(name + ".row_data", x.row_data, data[0], U8, device)
        shaped(name + ".row_scale_inv", x.row_scale_inv, scales[0], scale_dtypes, device)
    if x.col_data is not None:
        shaped(name + ".col_data", x.col_data, data[1], U8, device)
        shaped(name + ".col_scale_inv", x.col_scale_inv, scales[1], scale_dtypes, device)
    whole = global_scale_shape(scaling)
    if whole is not None:
        shaped(name + ".global_scale_inv", x.global_scale_inv, whole, F32, device)


def operand(name: str, x: Any, device: torch.device | None = None) -> None:
    """A float tensor or a whole record, with at least one dimension."""
    if isinstance(x, Quantized):
        record(name, x, device)
        own_values(name, x)
    elif isinstance(x, torch.Tensor):
        tensor(name, x, FLOATS, device)
        if x.ndim == 0:
            raise ValueError(f"{name}: got a tensor without dimensions, expected (..., K)")
    else:
        raise kind_error(name, x, "a torch.Tensor or a Quantized")


def own_values(name: str, x: Quantized) -> None:
    """A record that can be read by itself: not one of rotated values alone."""
    if x.scaling == "nvfp4_rht" and x.row_data is None:
        raise ValueError(
            f"{name}: has only the column-wise copy of nvfp4_rht scaling, which holds rotated values, expected the "
            "row-wise one"
        )


def needs_copy(name: str, x: Quantized, side: str) -> None:
    """The row-wise (``row``) or column-wise (``column``) copy is there."""
    if getattr(x, f"{side[:3]}_data") is None:
        other = "column" if side == "row" else "row"
        raise ValueError(f"{name}: has no {side}-wise copy, got a {other}-wise one only, expected {side} or both")


def broadcasts(name: str, x: torch.Tensor, to: Sequence[int]) -> None:
    """`x` expands to the shape `to` without enlarging it."""
    sizes = tuple(x.shape)
    if len(sizes) > len(to) or any(a not in (1, b) for a, b in zip(reversed(sizes), reversed(tuple(to)))):
        raise ValueError(f"{name}: got shape {sizes}, expected to broadcast to {tuple(to)}")
