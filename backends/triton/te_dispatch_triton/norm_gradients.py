# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Gradients of LayerNorm and RMSNorm. Contracts: `te_dispatch.ops.norm`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from te_dispatch.backend_kit.caches import cached
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import NormBackward
from te_dispatch.ops.shapes import rows_of
from te_dispatch_triton import configs
from te_dispatch_triton.kernels import norm_gradients as kernels
from te_dispatch_triton.launch import Config, Kernel
from te_dispatch_triton.memory import dense, empty
from te_dispatch_triton.replay import replayed
from te_dispatch_triton.targets import INTERPRETER, Target, target_of

_F32 = torch.float32
_gradients, _row_sums = Kernel(kernels.norm_gradients), Kernel(kernels.norm_gradient_sums)
_sum_weights = Kernel(kernels.sum_weights)


class _Form(NamedTuple):
    """How a call is launched. `programs` take rows in turns, at most; `whole`: a program holds whole rows."""

    bm: int
    bn: int
    stages: int
    programs: int
    whole: bool
    config: Config
    sum_rows: int
    sum_columns: int
    sum_config: Config


@replayed()
def layernorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward:
    """dx in one pass, which leaves partial sums of dgamma and dbeta for a second kernel."""
    checks.norm_bwd(dy, x, gamma, mean, rstd, add, True)
    return _backward(dy, x, gamma, dense(mean), rstd, zero_centered_gamma, add)


@replayed()
def rmsnorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward:
    """The same without mean."""
    checks.norm_bwd(dy, x, gamma, None, rstd, add, False)
    return _backward(dy, x, gamma, None, rstd, zero_centered_gamma, add)


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    zero_centered: bool,
    add: torch.Tensor | None,
) -> NormBackward:
    device, shape = x.device, tuple(x.shape)
    rows, columns, target = rows_of(shape), shape[-1], target_of(device)
    dx = empty("dx", shape, x.dtype, device)
    dgamma = empty("dgamma", (columns,), gamma.dtype, device)
    dbeta = None if mean is None else empty("dbeta", (columns,), gamma.dtype, device)
    form = _form(target, columns)
    parts = min(-(-rows // form.bm), form.programs)
    terms = 1 if mean is None else 2
    partial = empty("workspace", (parts, terms, columns), _F32, device)
    interpreted = target is INTERPRETER
    if parts:
        operands = (dense(dy), dense(x), dense(gamma), mean, dense(rstd))
        sums: Any = None
        if not form.whole:
            sums = empty("workspace", (2, rows), _F32, device)
            _row_sums(device, (rows, 1, 1), (*operands, sums, rows, columns), (zero_centered, form.bn), form.config)
        add = None if add is None else dense(add)
        stages = form.stages
        if stages > 1:
            width = dy.element_size() + x.element_size() + (0 if add is None else add.element_size())
            stages = configs.affordable(target, stages, form.bm * form.bn * width)
        _gradients(
            device, (parts, -(-columns // form.bn), 1),
            (*operands, add, dx, partial, sums, rows, columns),
            (zero_centered, interpreted, form.bm, form.bn, stages), form.config,
        )  # fmt: skip
    _sum_weights(
        device, (-(-columns // form.sum_columns), terms, 1), (partial, parts, columns, dgamma, dbeta),
        (interpreted, form.sum_rows, form.sum_columns), form.sum_config,
    )  # fmt: skip
    return NormBackward(dx, dgamma, dbeta)


@cached()
def _form(target: Target, columns: int) -> _Form:
    constants, config = configs.choose("norm", "gradients", target, columns=columns)
    sums = configs.choose("norm", "weights", target)
    width = constants.get("BN")
    return _Form(
        constants["BM"], width or triton.next_power_of_2(columns), constants["STAGES"],
        constants["PROGRAMS"] * target.processors, width is None, config, sums.constants["BR"], sums.constants["BN"],
        sums.config,
    )  # fmt: skip
