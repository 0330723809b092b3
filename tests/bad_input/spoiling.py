# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Ways to spoil one argument, by what it is. Each yields a label and the spoilt value.

Labels that start with ``same:`` name harmless changes, which must give the results of the original.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import DelayedQuantizer

Spoilt = Iterator[tuple[str, Any]]
_DTYPES = (torch.int64, torch.bool, torch.complex64, torch.float64, torch.uint8)


def spoilt(value: Any) -> Spoilt:
    if isinstance(value, torch.Tensor):
        yield from _tensor(value)
    elif isinstance(value, Quantized):
        yield from _record(value)
    elif dataclasses.is_dataclass(value):
        yield from _quantizer(value)
    elif isinstance(value, (list, tuple)):
        yield from _sequence(value)
    elif isinstance(value, torch.dtype):
        yield from (("int8", torch.int8), ("its name", "float32"), ("float64", torch.float64))
    elif isinstance(value, str):
        yield from (("unknown word", "bogus"), ("empty word", ""), ("number", 3), ("list", [value]), ("bytes", b"row"))
    elif isinstance(value, bool):
        yield from (("word", "yes"), ("list", []))
    elif isinstance(value, int):
        yield from (("negative", -5), ("word", "7"), ("fraction", 1.5), ("tensor", torch.ones(1)), ("huge", 10**6))
    elif isinstance(value, float):
        yield from (("word", "a"), ("negative", -3.0), ("large", 5.0), ("tensor", torch.ones(3)), ("list", [1.0]))


def _tensor(x: torch.Tensor) -> Spoilt:
    for dtype in _DTYPES:
        if dtype != x.dtype:
            yield f"dtype {dtype}", x.to(dtype)
    yield "one dimension more", x.unsqueeze(0)
    if x.ndim:
        yield "one dimension less", x[0].clone()
        yield "scalar", x.reshape(-1)[0].clone() if x.numel() else x.new_zeros(())
    for axis in range(x.ndim):
        yield f"longer dimension {axis}", torch.cat((x, x.narrow(axis, 0, 1)), axis)
        yield f"empty dimension {axis}", x.narrow(axis, 0, 0).clone()
    yield "meta device", x.to("meta")
    yield "list", x.tolist()
    yield "number", 1.0
    yield "word", "tensor"
    yield "same: every second element of memory", _strided(x)
    if x.ndim > 1:
        yield "same: transposed memory", x.transpose(0, -1).contiguous().transpose(0, -1)
    if x.is_floating_point():
        yield "NaN and Inf", _special(x)


def _strided(x: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def _special(x: torch.Tensor) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    flat = x.view(-1)
    for i, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        if i < flat.numel():
            flat[i] = value
    return x


def changed(x: Quantized, **fields: Any) -> Quantized:
    return Quantized(**{name: fields.get(name, getattr(x, name)) for name in Quantized.__slots__})


def _record(x: Quantized) -> Spoilt:
    yield "plain tensor", torch.ones(x.shape)
    yield "codes alone", x.row_data
    yield "number", 1.0
    yield "no copies", changed(x, row_data=None, col_data=None, row_scale_inv=None, col_scale_inv=None)
    yield "unknown encoding", changed(x, encoding="e3m4")
    yield "encoding of another size", changed(x, encoding="e4m3fn" if x.scaling == "nvfp4" else "e2m1")
    yield "unknown scaling", changed(x, scaling="per_row")
    yield "another scaling", changed(x, scaling="block_1d" if x.scaling != "block_1d" else "mxfp8")
    yield "unknown scale layout", changed(x, scale_layout="tiled")
    yield "scale layout of another scaling", changed(x, scale_layout="gemm_2d")
    yield "no dimensions", changed(x, shape=())
    yield "longer shape", changed(x, shape=(x.shape[0] + 1, *x.shape[1:]))
    yield "integer dtype", changed(x, dtype=torch.int32)
    yield "meta device", changed(x, device=torch.device("meta"))
    for side in ("row", "col"):
        if getattr(x, f"{side}_data") is None:
            continue
        data, scale = getattr(x, f"{side}_data"), getattr(x, f"{side}_scale_inv")
        yield f"{side} data of int8", changed(x, **{f"{side}_data": data.view(torch.int8)})
        yield f"{side} data too short", changed(x, **{f"{side}_data": data[1:]})
        yield f"{side} data on meta", changed(x, **{f"{side}_data": data.to("meta")})
        yield f"no {side} scales", changed(x, **{f"{side}_scale_inv": None})
        yield f"{side} scales too long", changed(x, **{f"{side}_scale_inv": torch.cat((scale, scale))})
        yield f"{side} scales of float64", changed(x, **{f"{side}_scale_inv": scale.double()})
    if x.global_scale_inv is not None:
        yield "no global scale", changed(x, global_scale_inv=None)


def _quantizer(q: Any) -> Spoilt:
    yield "word", "fp8"
    yield "class", type(q)
    yield "tensor", torch.ones(1)
    for encoding in ("e3m4", "e2m1" if q.encoding != "e2m1" else "e4m3fn", None):
        yield f"encoding {encoding}", _with(q, encoding=encoding)
    if isinstance(q, DelayedQuantizer):
        for name in ("scale", "amax"):
            state = getattr(q, name)
            yield f"{name} of two", _with(q, **{name: state.repeat(2)})
            yield f"{name} of float64", _with(q, **{name: state.double()})
            yield f"{name} on meta", _with(q, **{name: state.to("meta")})
            yield f"{name} a number", _with(q, **{name: 1.0})


def _with(q: Any, **fields: Any) -> Any:
    """A copy with fields that its constructor would refuse."""
    made = object.__new__(type(q))
    for field in dataclasses.fields(q):
        object.__setattr__(made, field.name, fields.get(field.name, getattr(q, field.name)))
    return made


def _sequence(values: Any) -> Spoilt:
    kind = type(values)
    yield "empty", kind()
    yield "shorter", values[:-1]
    yield "longer", values + values[-1:]
    yield "number", 4
    yield "word", "ab"
    if kind is list:
        yield "same: a tuple", tuple(values)
    if kind is tuple:
        yield "list", list(values)
    last = values[-1]
    for label, value in [("None", None), *spoilt(last)]:
        if not label.startswith("same:"):
            yield f"last entry {label}", kind([*values[:-1], value])
