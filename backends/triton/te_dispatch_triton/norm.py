# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""LayerNorm and RMSNorm: fp32 arithmetic, one rounding, casts from fp32. Contracts: `te_dispatch.ops.norm`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from te_dispatch.backend_kit.caches import cached
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import NormForward
from te_dispatch.ops.shapes import rows_of
from te_dispatch_triton import configs
from te_dispatch_triton.delivery import NO_CAST, NO_COPIES, Delivery, deliver_to
from te_dispatch_triton.kernels import norm as kernels
from te_dispatch_triton.kernels import norm_casts
from te_dispatch_triton.launch import Config, Kernel
from te_dispatch_triton.memory import dense, empty
from te_dispatch_triton.quantize_forms import laid_out
from te_dispatch_triton.replay import replayed
from te_dispatch_triton.targets import INTERPRETER, Target, target_of

_F32 = torch.float32
#: Of a configuration: the kernel starts as the one before it ends, and waits for it by itself.
_OVERLAPS = ("launch_pdl", True)
_rows, _tiles = Kernel(kernels.norm_rows), Kernel(kernels.norm_tiles)
_again, _columns = Kernel(norm_casts.norm_cast), Kernel(norm_casts.norm_columns)


class _Call(NamedTuple):
    """What a forward reads and what it leaves of every row, dense."""

    x: torch.Tensor
    residual: torch.Tensor | None
    residual_out: torch.Tensor | None
    gamma: torch.Tensor
    beta: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor
    rows: int
    columns: int
    eps: float


class _Form(NamedTuple):
    """How a pass is launched. programs: of a processor, where they take turns; 0 where every program has one block. Of
    "maxima", how many programs look for them."""

    bm: int
    bn: int
    stages: int
    programs: int
    config: Config


@replayed()
def layernorm_fwd(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_y: bool = False,
    out_dtype: torch.dtype | None = None,
) -> NormForward:
    """One pass over x, but for casts whose scales depend on more than the rows that a program holds."""
    checks.norm_fwd(x, gamma, beta, eps, residual, quantizer, usage, out_dtype)
    return _forward(x, gamma, beta, eps, zero_centered_gamma, residual, quantizer, usage, with_y, out_dtype, True)


@replayed()
def rmsnorm_fwd(
    x: torch.Tensor,
    gamma: torch.Tensor,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_y: bool = False,
    out_dtype: torch.dtype | None = None,
) -> NormForward:
    """The same without mean."""
    checks.norm_fwd(x, gamma, None, eps, residual, quantizer, usage, out_dtype)
    return _forward(x, gamma, None, eps, zero_centered_gamma, residual, quantizer, usage, with_y, out_dtype, False)


def _forward(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    residual: torch.Tensor | None,
    quantizer: Quantizer | None,
    usage: str,
    with_y: bool,
    out_dtype: torch.dtype | None,
    centered: bool,
) -> NormForward:
    shape, device, dtype = tuple(x.shape), x.device, out_dtype or x.dtype
    target = target_of(device)
    residual_out = None
    if residual is not None:
        residual, residual_out = dense(residual), empty("residual_out", shape, x.dtype, device)
    y = empty("y", shape, dtype, device) if quantizer is None or with_y else None
    mean = empty("mean", shape[:-1], _F32, device) if centered else None
    rstd = empty("rstd", shape[:-1], _F32, device)
    call = _Call(
        dense(x), residual, residual_out, dense(gamma), None if beta is None else dense(beta), mean, rstd,
        rows_of(shape), shape[-1], float(eps),
    )  # fmt: skip
    record = None
    if quantizer is not None:
        into = deliver_to(quantizer, usage, shape, dtype, device, target)
        _cast(call, target, device, zero_centered, into, y)
        record = laid_out(into.record, quantizer.scale_layout)
    elif call.rows:
        _one_pass(call, target, device, zero_centered, None, y)
    return NormForward(y, record, residual_out, mean, rstd)


def _cast(
    call: _Call, target: Target, device: torch.device, zero_centered: bool, into: Delivery, y: torch.Tensor | None
) -> None:
    """In one pass where the scales follow from rows that one program holds. Else a pass for the statistics, and the
    maxima where they are needed, and one that makes y, the same bits of it, again."""
    scaling = into.constants[0]
    if not into.needs_maxima:
        if into.copies[2] is None and scaling != "block_2d":
            _one_pass(call, target, device, zero_centered, into, y)
            return
        form = _tile_form(target, scaling + "_at_once") if scaling in ("tensor", "mxfp8") else None
        if form is not None and form.bm:
            _by_tiles(call, target, device, zero_centered, into, y, None, form)
            return
    fours, form = _second_form(target, into, call.rows)
    maxima = None
    if call.rows or into.needs_maxima:
        followed = fours and _OVERLAPS in form.config.options
        maxima = _one_pass(call, target, device, zero_centered, None, None, into.needs_maxima, followed)
    _second_pass(call, target, device, zero_centered, into, y, maxima, fours, form)


def _one_pass(
    call: _Call,
    target: Target,
    device: torch.device,
    zero_centered: bool,
    into: Delivery | None,
    y: torch.Tensor | None,
    looks_for_maxima: bool = False,
    followed: bool = False,
) -> torch.Tensor | None:
    """Statistics, and y, codes by rows or maxima of |y|, which it returns.

    followed: by a kernel that may start early.
    """
    scaling = "" if into is None else into.constants[0]
    turns = looks_for_maxima or (into is not None and into.history is not None)
    form = _row_form(target, call.columns, turns, scaling in ("", "tensor"))
    maxima = None
    if looks_for_maxima:
        maxima = empty("workspace", (_tile_form(target, "maxima").programs,), _F32, device)
    if not form.bm:
        _by_tiles(call, target, device, zero_centered, into, y, maxima, _tile_form(target, "long_rows"))
        return maxima
    bm, bn, stages, programs, config = form
    blocks = -(-call.rows // bm) or 1
    if maxima is not None:
        blocks = maxima.shape[0]
    elif programs:
        blocks = min(blocks, programs * target.processors)
    if stages > 1:
        size = call.x.element_size() * (1 if call.residual is None else 2)
        stages = configs.affordable(target, stages, bm * bn * size)
    copies, constants = (NO_COPIES, NO_CAST) if into is None else (into.copies, into.constants)
    scale, history, epsilon, inverse = (None, None, 0.0, None) if into is None else into[2:6]
    _rows(
        device, (blocks, 1, 1), (*call, y, copies[0], copies[1], scale, maxima, epsilon, inverse, history),
        (
            zero_centered, *constants, target is INTERPRETER, bm, bn, stages, maxima is not None or programs > 0,
            followed,
        ),
        config,
    )  # fmt: skip
    return maxima


def _by_tiles(
    call: _Call,
    target: Target,
    device: torch.device,
    zero_centered: bool,
    into: Delivery | None,
    y: torch.Tensor | None,
    maxima: torch.Tensor | None,
    form: _Form,
) -> None:
    """Rows that do not fit a program, and copies by columns that follow from a program's rows."""
    bm, bn, stages, _, config = form
    if stages > 1:
        size = call.x.element_size() * (1 if call.residual is None else 2)
        stages = configs.affordable(target, stages, bm * bn * size)
    copies, constants = (NO_COPIES, NO_CAST) if into is None else (into.copies, into.constants)
    scale, history, epsilon, inverse = (None, None, 0.0, None) if into is None else into[2:6]
    blocks = -(-call.rows // bm) or 1 if maxima is None else maxima.shape[0]
    _tiles(
        device, (blocks, 1, 1), (*call, y, *copies, scale, maxima, epsilon, inverse, history),
        (zero_centered, *constants, target is INTERPRETER, bm, bn, stages), config,
    )  # fmt: skip


def _by_fours(scaling: str, columns: bool, rows: int) -> bool:
    """Whether `norm_columns` serves."""
    return scaling in ("tensor", "block_1d", "block_2d") and columns and rows % 4 == 0


def _second_form(target: Target, into: Delivery, rows: int) -> tuple[bool, _Form]:
    """Whether `norm_columns` makes y again, and how that is launched."""
    scaling, only_rows = into.constants[0], into.copies[2] is None
    if _by_fours(scaling, not only_rows, rows):
        return True, _tile_form(target, "fours" if scaling == "tensor" else f"fours_{scaling}")
    return False, _tile_form(target, scaling + "_rows" if only_rows and scaling in ("tensor", "nvfp4") else scaling)


def _second_pass(
    call: _Call,
    target: Target,
    device: torch.device,
    zero_centered: bool,
    into: Delivery,
    y: torch.Tensor | None,
    maxima: torch.Tensor | None,
    fours: bool,
    form: _Form,
) -> None:
    """y and its cast, tile by tile, from statistics that are there."""
    copies, constants = into.copies, into.constants
    bm, bn, stages, turns, config = form
    down, across = -(-call.rows // bm), -(-call.columns // bn)
    if not down * across and into.inverse is None:
        return
    x = call.x if call.residual is None else call.residual_out
    down, stages = configs.in_turns(target, down, across, turns, stages, bm * bn * call.x.element_size())
    (_columns if fours else _again)(
        device,
        (down * across or 1, 1, 1),
        (
            x, call.gamma, call.beta, call.mean, call.rstd, call.rows, call.columns, y, *copies, into.scale, maxima,
            into.epsilon, into.inverse, into.history,
        ),
        (
            zero_centered, *constants, 1 if maxima is None else maxima.shape[0], target is INTERPRETER,
            bm // 4 if fours else bm, bn, *((stages, _OVERLAPS in config.options) if fours else ()),
        ),
        config,
    )  # fmt: skip


@cached()
def _row_form(target: Target, columns: int, turns: bool, plain: bool) -> _Form:
    """By the row's length alone, so that a row's result is the same in any company; bm 0 where it is too long.

    turns: programs had better take blocks of rows in turns, for they look for maxima.
    """
    constants, config = configs.choose("norm", "rows_in_turns" if turns else "rows", target, columns=columns)
    bn = triton.next_power_of_2(columns)
    bn = bn if plain else max(bn, 128)  # whole blocks
    return _Form(constants["BM"], bn, constants.get("STAGES", 1), constants.get("PROGRAMS", 0), config)


@cached()
def _tile_form(target: Target, name: str) -> _Form:
    """Tiles of whole blocks; tall ones where columns are written. bm 0 where another way is faster."""
    constants, config = configs.choose("norm", name, target)
    programs = constants.get("PARTS", constants.get("PROGRAMS", 0))
    return _Form(constants["BM"], constants.get("BN", 0), constants.get("STAGES", 1), programs, config)
