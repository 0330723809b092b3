# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products of several groups in one launch: what of them the host tells the kernel, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from te_dispatch.core.errors import Declined
from te_dispatch.ops.checks import gemm as checks
from te_dispatch.ops.gemm import gemm_sizes
from te_dispatch_triton.gemm import Operand, allows_tf32
from te_dispatch_triton.gemm_plans import Problem, kind_of, planned
from te_dispatch_triton.gemm_product import Side, pair_of, side_of
from te_dispatch_triton.kernels import gemm_grouped as kernels
from te_dispatch_triton.launch import Config, Kernel
from te_dispatch_triton.memory import address, dense, empty
from te_dispatch_triton.tape import read
from te_dispatch_triton.targets import INTERPRETER, target_of

_FILL, _GROUPED = Kernel(kernels.fill), Kernel(kernels.grouped)
#: Values that one launch writes to the table, in steps of so many; a launch takes 4 KiB of arguments.
_MOST, _STEP = 256, 64
_FILL_CONFIG = Config(num_warps=1, num_stages=1)
_TYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8,
}  # fmt: skip


class Row(NamedTuple):
    """What the table holds of a group: addresses, sizes, elements between stored rows."""

    a: int
    b: int
    out: int
    bias: int
    a_scale: int
    b_scale: int
    m: int
    n: int
    k: int
    a_stride: int
    b_stride: int
    a_whole: int
    b_whole: int


class Group(NamedTuple):
    """One product: operands as they are multiplied, where the result goes."""

    left: Side
    right: Side
    target: torch.Tensor
    bias: torch.Tensor | None
    sizes: tuple[int, int, int]


def run(
    parts: Sequence[Operand],
    b: Sequence[Operand],
    whole: Operand | None,
    splits: torch.Tensor | None,
    layout: str,
    out: Sequence[torch.Tensor] | None,
    accumulate: bool,
    bias: Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype | None,
    split: bool,
    decoded: bool,
) -> list[torch.Tensor]:
    """All groups. whole, splits: the operand that `parts` are parts of, where programs find out which."""
    count = len(b)
    checks.grouped_options(count, out, bias)
    outs: Sequence[Any] = [None] * count if out is None else out
    biases: Sequence[Any] = [None] * count if bias is None else bias
    # All of them before the first is written.
    shapes = [
        checks.gemm(parts[i], b[i], layout, outs[i], accumulate, biases[i], out_dtype=out_dtype) for i in range(count)
    ]
    groups = [
        _group(parts[i], b[i], layout, shapes[i], outs[i], accumulate, biases[i], out_dtype) for i in range(count)
    ]
    dealt, base = "none", None
    if whole is not None:
        base = side_of(whole, "a", layout)
        dealt = ("k_" if layout == "TN" else "m_") + ("rows" if base.along_k == (layout[0] == "N") else "columns")
    scaling = _one([pair_of(x, y) for x, y in zip(parts, b)], "scalings")
    _launch(groups, base, splits, dealt, scaling, accumulate, split, decoded)
    results = []
    for group, given in zip(groups, outs):
        if given is not None and given is not group.target:
            given.copy_(group.target)
        results.append(group.target if given is None else given)
    return results


def _group(
    x: Any, y: Any, layout: str, shape: tuple[int, ...], out: torch.Tensor | None, accumulate: bool,
    bias: torch.Tensor | None, out_dtype: torch.dtype | None,
) -> Group:  # fmt: skip
    dtype = out_dtype or (x.dtype if out is None else out.dtype)
    left, right = side_of(x, "a", layout), side_of(y, "b", layout)
    target = out
    if out is None:
        target = empty("out", shape, dtype, left.data.device)
    elif not out.is_contiguous():
        target = empty("workspace", tuple(out.shape), out.dtype, out.device)
        if accumulate:
            target.copy_(out)
    assert target is not None
    return Group(left, right, target, bias if bias is None else dense(bias), gemm_sizes(x, y, layout))


def _one(found: Sequence[Any], what: str) -> Any:
    """What all groups have in common."""
    if any(x != found[0] for x in found):
        raise Declined(f"groups of different {what}: {', '.join(sorted(set(map(str, found))))}")
    return found[0]


def _launch(
    groups: Sequence[Group],
    base: Side | None,
    splits: torch.Tensor | None,
    dealt: str,
    scaling: str,
    accumulate: bool,
    split: bool,
    decoded: bool,
) -> None:
    left, right, target = groups[0].left, groups[0].right, groups[0].target
    device = target.device
    chip = target_of(device)
    _one([(x.left.code, x.left.along_k, x.left.tiles, x.left.data.dtype) for x in groups], "first operands")
    _one([(x.right.code, x.right.along_k, x.right.tiles, x.right.data.dtype) for x in groups], "second operands")
    _one([(x.target.dtype, None if x.bias is None else x.bias.dtype) for x in groups], "results or biases")
    rows = [_row(group, base) for group in groups]
    # Strides and n are told to be multiples of 16 elements, addresses of 16 bytes.
    low = 0
    for row in rows:
        low |= row.a | row.b | row.out | row.a_stride | row.b_stride | row.n | row.k
    aligned = low & 15 == 0
    problem = Problem(
        max(x.m for x in rows), max(x.n for x in rows), max(x.k for x in rows), left.along_k, right.along_k,
        left.code, right.code, left.tiles, right.tiles, scaling, left.data.dtype,
        left.data.dtype is torch.float32 and read(allows_tf32), split, False, False, decoded, "none", accumulate,
    )  # fmt: skip
    tiles = 0
    plan = planned(device, problem)
    for row in rows:
        tiles += -(-row.m // plan.block_m) * -(-row.n // plan.block_n)
    if not tiles:
        return
    table = empty("workspace", (len(rows) * len(Row._fields) + _STEP,), torch.int64, device)
    _send(table, rows, device)
    bias = groups[0].bias
    scale = left.scale
    kind = kind_of(problem, chip)
    even = dealt[0] != "k" and all(row.k % plan.block_k == 0 for row in rows)
    constants = (
        left.along_k, right.along_k, left.code, right.code, left.tiles, right.tiles, scaling, plan.units,
        plan.promote, "tf32" if kind == "tf32" else "ieee", even, chip is INTERPRETER, accumulate,
        _TYPES[left.data.dtype], _TYPES[target.dtype], tl.float32 if bias is None else _TYPES[bias.dtype],
        tl.float32 if scale is None else _TYPES[scale.dtype], bias is not None, dealt, aligned,
        plan.block_m, plan.block_n, plan.block_k, plan.group, plan.promoted,
    )  # fmt: skip
    programs = min(tiles, 2 * chip.processors)
    _GROUPED(device, (programs, 1, 1), (table, splits, len(rows)), constants, plan.config)


def _row(group: Group, base: Side | None) -> Row:
    left, right = group.left, group.right
    m, n, k = group.sizes
    stride = left.stride if base is None else base.stride
    return Row(
        address((left if base is None else base).data), address(right.data), address(group.target),
        *(0 if x is None else address(x) for x in (group.bias, left.scale, right.scale)), m, n, k, stride,
        right.stride, *(0 if x is None else address(x) for x in (left.whole, right.whole)),
    )  # fmt: skip


def _send(table: torch.Tensor, rows: Sequence[Row], device: torch.device) -> None:
    """Write the rows, in launches that carry them as arguments (`kernels.gemm_grouped.fill` says how they are told)."""
    values = [value * 16 + (1 << 36) for row in rows for value in row]
    for offset in range(0, len(values), _MOST):
        part = values[offset : offset + _MOST]
        part += [1 << 36] * (-len(part) % _STEP)
        _FILL(device, (1, 1, 1), (table, tuple(part)), (offset, len(part)), _FILL_CONFIG)
