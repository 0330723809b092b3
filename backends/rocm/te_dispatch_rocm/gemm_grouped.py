# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A product per group, all of them in one native call. Contracts: `te_dispatch.ops.gemm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.memory import contiguous_out
from te_dispatch.backend_kit.products import allows_tf32
from te_dispatch.numerics.quantized import Quantized, row_parts
from te_dispatch.ops.checks import gemm as checks
from te_dispatch_rocm.gemm import plan_with_bias
from te_dispatch_rocm.gemm_operands import empty_product, quantized_operands
from te_dispatch_rocm.gemm_plans import plain_operands, problem_of
from te_dispatch_rocm.memory import ALIGNED, address, empty, place_of, usable, usable_or_none
from te_dispatch_rocm.native import load

_native = load()


def grouped_gemm(
    a: Sequence[torch.Tensor | Quantized],
    b: Sequence[torch.Tensor | Quantized],
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    layout: str,
    out: Sequence[torch.Tensor] | None = None,
    accumulate: bool = False,
    bias: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    split_accumulator: bool | None = None,
) -> list[torch.Tensor]:
    """Splits in host integers. A plan per shape, launched one after the other on one workspace."""
    rows = checks.groups(a, b, splits)
    count = len(b)
    checks.grouped_options(count, out, bias)
    parts = a if rows is None else row_parts(a[0], rows)
    outs = [None] * count if out is None else out
    biases = [None] * count if bias is None else bias
    # All of them before the first is written.
    shapes = [
        checks.gemm(parts[i], b[i], layout, outs[i], accumulate, biases[i], out_dtype=out_dtype) for i in range(count)
    ]
    groups = [
        _group(parts[i], b[i], layout, shapes[i], outs[i], accumulate, biases[i], out_dtype) for i in range(count)
    ]
    launched = [group for group in groups if group.plan is not None]
    if launched:
        index, stream_of = place_of(launched[0].target)
        size = max(group.plan.workspace for group in launched)
        workspace = empty("workspace", (size,), torch.uint8, launched[0].target.device) if size else None
        _native.gemm_run_grouped(
            [group.plan for group in launched], stream_of(index), [group.addresses for group in launched],
            address(workspace),
        )  # fmt: skip
    for group in groups:
        if group.plan is None:
            empty_product(*group.nothing)
        elif group.added is not None:
            group.target.add_(group.added.detach())
    for given, group in zip(outs, groups):
        if given is not None and given is not group.target:
            given.copy_(group.target)
    return [group.target for group in groups] if out is None else list(out)


def grouped_gemm_device_splits(
    a: Sequence[torch.Tensor | Quantized],
    b: Sequence[torch.Tensor | Quantized],
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    layout: str,
    out: Sequence[torch.Tensor] | None = None,
    accumulate: bool = False,
    bias: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    split_accumulator: bool | None = None,
) -> list[torch.Tensor]:
    """`grouped_gemm` with splits on the device, which are read back."""
    return grouped_gemm(
        a, b, splits, layout=layout, out=out, accumulate=accumulate, bias=bias, out_dtype=out_dtype,
        split_accumulator=split_accumulator,
    )  # fmt: skip


class _Group(NamedTuple):
    #: None where there is nothing to multiply.
    plan: Any
    #: Of a, b, their scales, the output, the bias.
    addresses: tuple[int, ...]
    target: torch.Tensor
    #: Tensors that were made for this call and must outlive the launch.
    held: tuple[Any, ...]
    #: A bias that the plan leaves out.
    added: torch.Tensor | None = None
    #: Arguments of `empty_product` where there is no plan.
    nothing: tuple[Any, ...] = ()


def _group(
    x: torch.Tensor | Quantized,
    y: torch.Tensor | Quantized,
    layout: str,
    shape: tuple[int, ...],
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> _Group:
    dtype = out_dtype or (x.dtype if out is None else out.dtype)
    if isinstance(x, Quantized):
        assert isinstance(y, Quantized)
        left, right, sizes = quantized_operands(x, y, layout)
        scaling = x.scaling
    else:
        assert isinstance(y, torch.Tensor)
        left, right, sizes = plain_operands(usable(x), usable(y), layout)
        scaling = "none"
    memory = left.data.device
    target = empty("out", shape, dtype, memory) if out is None else contiguous_out(out, accumulate, ALIGNED)
    if not all(sizes):
        return _Group(None, (), target, (), nothing=(shape, dtype, memory, target, accumulate, bias))
    device, _ = place_of(left.data)
    tf32 = left.kind is torch.float32 and allows_tf32()

    def problem(bias_dtype: torch.dtype | None) -> Any:
        return problem_of(left, right, sizes, scaling, device, dtype, accumulate, bias_dtype, tf32=tf32)

    bias = usable_or_none(bias)
    biased = plan_with_bias(problem, dtype, bias, None)
    given = biased.given(bias)
    places = left.data, right.data, left.scale, right.scale, target, given
    added = bias if biased.added else None
    return _Group(biased.plan, tuple(map(address, places)), target, (left, right, given), added)
