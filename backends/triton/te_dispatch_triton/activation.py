# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations and their gradients, in fp32 with one rounding. Formulas and contracts: `te_dispatch.ops.activation`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_dispatch.backend_kit.caches import cached
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.activation import CLAMPED_SWIGLU, GATED
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import ActivationBackward, ActivationForward
from te_dispatch.ops.shapes import rows_of
from te_dispatch_triton import configs, sums
from te_dispatch_triton.delivery import NO_CAST, NO_COPIES, Delivery, deliver_to
from te_dispatch_triton.kernels import activation_tiles as kernels
from te_dispatch_triton.launch import Config, Kernel
from te_dispatch_triton.memory import dense, empty
from te_dispatch_triton.quantize import cast
from te_dispatch_triton.quantize_forms import laid_out, values
from te_dispatch_triton.replay import replayed
from te_dispatch_triton.targets import INTERPRETER, Target, target_of

_F32 = torch.float32
#: Columns that every width of a tile of blocks divides.
_BLOCK = 128
_tiles, _columns = Kernel(kernels.activation_tiles), Kernel(kernels.activation_columns)
_maxima = Kernel(kernels.activation_maxima)

#: The function of one value that each kind applies; to u, where it is gated.
_FUNCTIONS = {
    "gelu": "gelu", "qgelu": "qgelu", "relu": "relu", "srelu": "srelu", "silu": "silu", "geglu": "gelu",
    "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "logistic",
    "clamped_swiglu": "clamped",
}  # fmt: skip


class _Operands(NamedTuple):
    """What an activation reads: dy or None, x, x's inverse scale or None, x's encoding or "", both dense."""

    dy: torch.Tensor | None
    x: torch.Tensor
    inverse: torch.Tensor | None
    encoding: str
    kind: str
    params: tuple[float, float]
    rows: int
    half: int


class _Form(NamedTuple):
    """How a pass is launched. split: a program delivers one of two gradients; parts: programs that look for maxima;
    stages, programs: of tiles that programs take in turns, so many programs a processor; 0 where each has one."""

    bm: int
    bn: int
    split: bool
    parts: int
    stages: int
    programs: int
    config: Config


@replayed()
def activation_fwd(
    x: torch.Tensor | Quantized,
    *,
    kind: str,
    params: tuple[float, float] | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_out: bool = False,
    out_dtype: torch.dtype | None = None,
) -> ActivationForward:
    """Any activation, with an optional cast from fp32, in one pass (two for a cast that needs the tensor's amax)."""
    checks.activation_fwd(x, kind, params, quantizer, usage, out_dtype)
    dtype, device = out_dtype or x.dtype, x.device
    shape = (*x.shape[:-1], x.shape[-1] // 2) if kind in GATED else tuple(x.shape)
    read = _operands(None, x, kind, params, rows_of(shape), shape[-1])
    out = empty("out", shape, dtype, device) if quantizer is None or with_out else None
    return ActivationForward(out, _run(read, shape, dtype, device, quantizer, usage, out, None))


@replayed()
def activation_bwd(
    dy: torch.Tensor,
    x: torch.Tensor | Quantized,
    *,
    kind: str,
    params: tuple[float, float] | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_dx: bool = False,
    with_dbias: bool = False,
) -> ActivationBackward:
    """Any activation's gradient, with an optional cast and bias gradient from fp32."""
    checks.activation_bwd(dy, x, kind, params, quantizer, usage)
    dtype, shape, device = dy.dtype, tuple(x.shape), dy.device
    read = _operands(dense(dy), x, kind, params, rows_of(shape), dy.shape[-1])
    dx = empty("dx", shape, dtype, device) if quantizer is None or with_dx else None
    dbias = empty("dbias", shape[-1:], dtype, device) if with_dbias else None
    return ActivationBackward(dx, _run(read, shape, dtype, device, quantizer, usage, dx, dbias), dbias)


def _operands(
    dy: torch.Tensor | None,
    x: torch.Tensor | Quantized,
    kind: str,
    params: tuple[float, float] | None,
    rows: int,
    half: int,
) -> _Operands:
    """Codes of a tensor-scaled record are decoded as they are read; other records first, to fp32."""
    inverse, encoding = None, ""
    if isinstance(x, Quantized):
        if x.scaling == "tensor" and x.row_data is not None and x.row_data.is_contiguous():
            inverse, encoding, x = x.row_scale_inv, x.encoding, x.row_data
        else:
            x = values(x, _F32)
    else:
        x = dense(x)
    return _Operands(dy, x, inverse, encoding, kind, params or CLAMPED_SWIGLU, rows, half)


def _run(
    read: _Operands,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    quantizer: Quantizer | None,
    usage: str,
    out: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> Quantized | None:
    """All passes of a call."""
    target = target_of(device)
    if quantizer is None:
        _pass(read, target, device, None, None, out, dbias)
        return None
    if read.dy is not None and read.kind in GATED and quantizer.scaling != "tensor" and read.half % _BLOCK:
        return _through_memory(read, shape, dtype, device, target, quantizer, usage, out, dbias)
    into = deliver_to(quantizer, usage, shape, dtype, device, target)
    maxima = None
    if into.needs_maxima:
        maxima = _find_maxima(read, target, device)
    _pass(read, target, device, into, maxima, out, dbias)
    return laid_out(into.record, quantizer.scale_layout)


def _through_memory(
    read: _Operands,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    target: Target,
    quantizer: Quantizer,
    usage: str,
    out: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> Quantized:
    """A block-scaled cast of both gradients of a gated activation where blocks straddle the two."""
    values = empty("workspace", shape, _F32, device)
    _pass(read, target, device, None, None, values, dbias)
    if out is not None:
        _pass(read, target, device, None, None, out, None)
    record = cast(values, quantizer, usage)
    record.dtype = dtype
    return record


def _pass(
    read: _Operands,
    target: Target,
    device: torch.device,
    into: Delivery | None,
    maxima: torch.Tensor | None,
    out: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> None:
    """The pass that delivers, and a short one for the bias gradient."""
    dy, x, x_inverse, x_encoding, kind, (limit, alpha), rows, half = read
    gated = kind in GATED
    copies, constants = (NO_COPIES, NO_CAST) if into is None else (into.copies, into.constants)
    two_results = gated and dy is not None
    fours = _by_fours(constants[0], copies[2] is not None, dbias is not None, dy is not None, two_results, rows)
    form = _form(target, constants[0], copies[2] is None, two_results, dbias is None, fours)
    bm, bn, split, _, stages, turns, config = form
    if copies[2] is None and dbias is None and not gated and constants[0] in ("", "tensor"):
        rows, half = 1, rows * half  # one line
    down, across = -(-rows // bm), -(-half // bn)
    down, stages = configs.in_turns(target, down, across, turns, stages, bm * bn * _bytes_read(read))
    columns = 2 * half if gated and dy is not None else half
    partial = None if dbias is None else sums.workspace(down, columns, device)
    tiles = down * across * (2 if split else 1)
    if tiles or (into is not None and into.inverse is not None):
        scale, history, epsilon, inverse = (None, None, 0.0, None) if into is None else into[2:6]
        kernel, shared, last = (_tiles, (split,), ()) if not fours else (_columns, (), (stages,))
        kernel(
            device,
            (tiles or 1, 1, 1),
            (
                dy, x, x_inverse, rows, half, limit, alpha, out, *copies, partial if tiles else None, scale, maxima,
                epsilon, inverse, history,
            ),
            (
                _FUNCTIONS[kind], gated, *shared, x_encoding, target.conversion(x_encoding), *constants,
                1 if maxima is None else maxima.shape[0], target.backend == "cuda", target is INTERPRETER,
                bm // 4 if fours else bm, bn, *last,
            ),
            config,
        )  # fmt: skip
    if partial is not None:
        sums.finish(partial, down, dbias)  # type: ignore[arg-type]


def _find_maxima(read: _Operands, target: Target, device: torch.device) -> torch.Tensor:
    """Partial maxima of the result's magnitudes."""
    dy, x, x_inverse, x_encoding, kind, (limit, alpha), rows, half = read
    bm, bn, _, parts, _, _, config = _form(target, "maxima", True, False, True, False)
    maxima = empty("workspace", (parts,), _F32, device)
    _maxima(
        device,
        (parts, 1, 1),
        (dy, x, x_inverse, rows, half, limit, alpha, maxima),
        (
            _FUNCTIONS[kind], kind in GATED, x_encoding, target.conversion(x_encoding), target.backend == "cuda", bm, bn
        ),
        config,
    )  # fmt: skip
    return maxima


def _bytes_read(read: _Operands) -> int:
    """For every element of the forward's result, or of a gradient."""
    size = read.x.element_size() * (2 if read.kind in GATED else 1)
    return size if read.dy is None else size + read.dy.element_size()


def _by_fours(scaling: str, columns: bool, sums: bool, backward: bool, two_results: bool, rows: int) -> bool:
    """Whether `activation_columns` serves. Two gradients in blocks are too much for a program's registers."""
    if rows % 4:
        return False
    if scaling in ("", "tensor"):
        return columns or sums
    return columns and ((scaling == "block_1d" and not two_results) or (scaling == "block_2d" and not backward))


@cached()
def _form(target: Target, scaling: str, no_columns: bool, two_results: bool, no_sums: bool, fours: bool) -> _Form:
    """Tiles of whole blocks where there are any; tall ones where columns are written or summed."""
    if fours:
        name = "fours" if no_sums or two_results else "fours_sums" if scaling else "sums"
        if scaling not in ("", "tensor"):
            name = f"fours_{scaling}"
    elif scaling in ("", "tensor"):
        name = "lines" if no_columns and no_sums else "columns"
    elif no_columns and scaling not in ("block_2d", "maxima"):
        name = "block_lines"
    else:
        name = scaling
    constants, config = configs.choose("activation", name + ("_twice" if two_results else ""), target)
    return _Form(
        constants["BM"], constants["BN"], constants.get("SPLIT", False), constants.get("PARTS", 1),
        constants.get("STAGES", 0), constants.get("PROGRAMS", 0), config,
    )  # fmt: skip
