# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout with residual add, multi-tensor steps, mixture-of-experts. Contracts: `te_dispatch.ops.training`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
import triton.language as tl

from te_dispatch.backend_kit.caches import cached
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.checks import training as checks
from te_dispatch.ops.results import DropoutAddForward, MoePermute, MoeUnpermuteBackward
from te_dispatch_triton.configs import Choice, choose
from te_dispatch_triton.kept_tables import Known, Tables
from te_dispatch_triton.kernels import dropout, moe, moe_sort, optimizer
from te_dispatch_triton.launch import Config, Kernel, blocks
from te_dispatch_triton.memory import dense, empty
from te_dispatch_triton.replay import replayed
from te_dispatch_triton.targets import INTERPRETER, target_of
from te_dispatch_triton.training_tables import CODES, Layout, Table, Tensors, contiguous, returned, sent
from te_dispatch_triton.training_tables import tables as written

_dropout_forward, _dropout_backward = Kernel(dropout.dropout_forward), Kernel(dropout.dropout_backward)
_adam, _scale = Kernel(optimizer.adam), Kernel(optimizer.scale_tensors)
_partial_norms, _finish_norms = Kernel(optimizer.partial_norms), Kernel(optimizer.finish_norms)
_count_experts, _rank_choices = Kernel(moe_sort.count_experts), Kernel(moe_sort.rank_choices)
_spread, _gather, _scatter = Kernel(moe.spread_rows), Kernel(moe.gather_rows), Kernel(moe.scatter_gradients)
_clear_marks, _clear_rows = Kernel(moe.clear_marks), Kernel(moe.clear_rows)
_ADAM, _NORMS, _SCALES, _SCALES_IN_PLACE = Tables(), Tables(), Tables(), Tables()
Found = tuple[Known, list[torch.Tensor]]
#: Choices of a token whose rows are in flight together.
_UNROLLED = 8
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@cached()
def _choice(kernel: str, device: torch.device, columns: int = 0) -> tuple[tuple[int, ...], Config, bool]:
    """What configs/training.json says: values of the constants in the file's order, how to compile, and whether this is
    Triton's interpreter."""
    target = target_of(device)
    made: Choice = choose("training", kernel, target, columns=columns)
    return tuple(made.constants.values()), made.config, target is INTERPRETER


@replayed()
def dropout_add_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> DropoutAddForward:
    """residual + dropout(x + bias), in fp32 with one rounding; the mask comes from Philox 4x32-10."""
    checks.dropout_add_fwd(x, residual, bias, dropout_p, rng_state)
    shape, dtype, device = x.shape, x.dtype, x.device
    n, columns = x.numel(), shape[-1]
    out = empty("out", shape, dtype, device)
    mask = empty("mask", shape, torch.uint8, device) if dropout_p > 0.0 else None
    if n == 0:
        return DropoutAddForward(out, mask)
    if not x.is_contiguous():
        x = dense(x)
    if residual is not None and not residual.is_contiguous():
        residual = dense(residual)
    if bias is not None and not bias.is_contiguous():
        bias = dense(bias)
    if mask is None:
        rng_state = None
    elif not rng_state.is_contiguous():  # type: ignore[union-attr]  # checked
        rng_state = dense(rng_state)  # type: ignore[arg-type]
    constants, config, interpreted = _choice("dropout_forward", device)
    block = constants[0]
    _dropout_forward(
        device,
        (blocks(n, block), 1, 1),
        (x, residual, bias, rng_state, out, mask, n, columns, _threshold(dropout_p), 1.0 / (1.0 - dropout_p)),
        (mask is not None, columns >= block, interpreted, *constants),
        config,
    )
    return DropoutAddForward(out, mask)


def _threshold(p: float) -> int:
    """p 2^32 as an unsigned word, less 2^31."""
    return min(round(p * 4294967296.0), 4294967295) - 2147483648


@replayed()
def dropout_add_bwd(dy: torch.Tensor, mask: torch.Tensor | None = None, *, dropout_p: float = 0.0) -> torch.Tensor:
    """dy * mask / (1 - p)."""
    checks.dropout_add_bwd(dy, mask, dropout_p)
    device, n = dy.device, dy.numel()
    dx = empty("result", dy.shape, dy.dtype, device)
    if n:
        constants, config, interpreted = _choice("dropout_backward", device)
        if not dy.is_contiguous():
            dy = dense(dy)
        if mask is not None and not mask.is_contiguous():
            mask = dense(mask)
        args = (dy, mask, dx, n, 1.0 / (1.0 - dropout_p))
        _dropout_backward(device, (blocks(n, constants[0]), 1, 1), args, (interpreted, *constants), config)
    return dx


def multi_tensor_adam(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    step: int = 1,
    weight_decay: float = 0.0,
    adam_w: bool = True,
    bias_correction: bool = True,
    master: Sequence[torch.Tensor] | None = None,
    noop_flag: torch.Tensor | None = None,
) -> None:
    """One step of all tensors, in place, in fp32: a launch for every 1024 of them, and those that write its table."""
    given = (params, grads, exp_avgs, exp_avg_sqs, master)
    found = _ADAM.find(given)
    if found is None:
        checks.adam_tensors(*given)
    device = params[0].device
    checks.adam_numbers(lr, beta1, beta2, eps, step, weight_decay, noop_flag, device)
    constants, config, interpreted = _choice("adam", device)
    lists = [params, grads, exp_avgs, exp_avg_sqs, master or ()]
    found, dense_lists, steps = _tables(_ADAM, found, given, lists, constants[0])
    corrections = (1.0 - beta1**step, 1.0 - beta2**step) if bias_correction else (1.0, 1.0)
    numbers = (lr, beta2, eps, 1.0 - beta1, 1.0 - beta2, *corrections, weight_decay)
    options = (_TYPES[params[0].dtype], _TYPES[grads[0].dtype], master is not None, weight_decay != 0.0, bool(adam_w))
    for table in steps:
        args = (table.words, table.entries, noop_flag, *map(float, numbers))
        _adam(
            device, (table.programs, 1, 1), args, (*options, table.most, table.aligned, interpreted, *constants), config
        )
    for place in (0, 2, 3, 4):
        returned(lists[place], dense_lists[place])


def _tables(
    tables: Tables, found: Found | None, given: Sequence[Any], lists: list[Tensors], chunk: int, code: Any = None
) -> tuple[Found | None, list[Tensors], list[Table]]:
    """What is known of lists that passed checks, if they are or may be kept; the lists made dense; their tables."""
    if found is None:
        dense_lists = [contiguous(tensors) for tensors in lists]
        layout = Layout(dense_lists, chunk, code)
        if all(map(is_, lists, dense_lists)):
            found = tables.keep(given, layout)
        if found is None:
            return None, dense_lists, written(dense_lists, layout)
    known, tensors = found
    return found, lists, known.tables(tensors)


def multi_tensor_l2norm(tensors: Sequence[torch.Tensor], *, per_tensor: bool = False) -> torch.Tensor:
    """The square root of sums of squares, in fp32: of chunks, then of these."""
    found = _NORMS.find((tensors,))
    if found is None:
        checks.multi_tensor_l2norm(tensors)
    device = tensors[0].device
    out = empty("result", (len(tensors) if per_tensor else 1,), torch.float32, device)
    constants, config, _ = _choice("partial_norms", device)
    found, held, parts = _tables(
        _NORMS, found, (tensors,), [tensors], constants[0], lambda place: CODES[tensors[place].dtype]
    )
    partials = empty("workspace", (max(sum([table.programs for table in parts]), 1),), torch.float32, device)
    done = 0
    for table in parts:
        args = (table.words, table.entries, partials, done)
        _partial_norms(device, (table.programs, 1, 1), args, (table.most, table.aligned, *constants), config)
        done += table.programs
    starts = None
    if per_tensor:
        starts = sent(Layout(held, constants[0]).ranges, device) if found is None else found[0].starts()
    constants, config, _ = _choice("finish_norms", device)
    _finish_norms(device, (out.shape[0], 1, 1), (starts, partials, out, done), constants, config)
    return out


def multi_tensor_scale(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    scale: float,
    *,
    noop_flag: torch.Tensor | None = None,
) -> None:
    """outputs[i] = inputs[i] * scale; the flag is raised by any input that is not finite."""
    in_place = _same(inputs, outputs)
    given, kept = ((inputs,), _SCALES_IN_PLACE) if in_place else ((inputs, outputs), _SCALES)
    found = kept.find(given)
    if found is None:
        checks.scale_tensors(inputs, outputs)
    device = inputs[0].device
    checks.scale_number(scale, noop_flag, device)
    constants, config, interpreted = _choice("scale_tensors", device)
    code = lambda i: CODES[inputs[i].dtype] | CODES[outputs[i].dtype] << 2  # noqa: E731
    _, held, parts = _tables(kept, found, given, [inputs, () if in_place else outputs], constants[0], code)
    for table in parts:
        args = (table.words, table.entries, float(scale), noop_flag)
        _scale(device, (table.programs, 1, 1), args, (table.most, table.aligned, interpreted, *constants), config)
    returned(outputs, held[0 if in_place else 1])


def _same(lists: Any, others: Any) -> bool:
    """Whether two lists hold the same tensors, as they do that are scaled in place."""
    if lists is others:
        return True
    both = lists.__class__ in (list, tuple) and others.__class__ in (list, tuple)
    return both and len(lists) == len(others) and all(map(is_, lists, others))


@replayed()
def moe_permute(
    x: torch.Tensor | Quantized,
    indices: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
    capacity: int | None = None,
) -> MoePermute:
    """A stable counting sort of the choices by expert, then rows move as they are; nothing is read back."""
    checks.moe_permute(x, indices, probs, capacity)
    tokens, top_k = indices.shape
    rows = tokens * top_k if capacity is None else capacity
    device = indices.device
    row_map = empty("row_map", (tokens, top_k), torch.int32, device)
    sorted_probs = None if probs is None else empty("probs", (rows,), probs.dtype, device)
    filled = _sort(dense(indices), None if probs is None else dense(probs), row_map, sorted_probs, rows)
    if not isinstance(x, Quantized):
        return MoePermute(_spread_rows("permuted", x, row_map, filled, rows), row_map, sorted_probs)
    assert x.row_data is not None and x.row_scale_inv is not None  # checked
    data = _spread_rows("row_data", x.row_data, row_map, filled, rows)
    scale = x.row_scale_inv
    if x.scaling != "tensor":
        scale = _spread_rows("row_scale_inv", scale, row_map, filled, rows)
    permuted = Quantized(
        data, None, scale, None, x.encoding, x.scaling, x.scale_layout, (rows, x.shape[-1]), x.dtype, x.device,
        x.global_scale_inv,
    )  # fmt: skip
    return MoePermute(permuted, row_map, sorted_probs)


def _sort(
    indices: torch.Tensor,
    probs: torch.Tensor | None,
    row_map: torch.Tensor,
    sorted_probs: torch.Tensor | None,
    rows: int,
) -> torch.Tensor:
    """Fills row_map and sorted_probs; returns how many rows are filled, int64 (1,) in device memory."""
    device, choices = indices.device, indices.numel()
    if choices > 2**31 - 1:
        raise ValueError(f"indices: got {choices} choices, expected no more than row_map's int32 can number")
    (block,), config, _ = _choice("count_experts", device)
    segments = max(1, min(blocks(choices, block), int(moe_sort.SEGMENTS.value)))
    length = blocks(choices, segments)
    experts = int(moe_sort.EXPERTS.value)
    counts = empty("workspace", (segments, experts), torch.int32, device)
    largest = empty("workspace", (segments,), torch.int32, device)
    filled = empty("workspace", (1,), torch.int64, device)
    _count_experts(device, (segments, 1, 1), (indices, counts, largest, choices, length), (block,), config)
    constants, config, _ = _choice("rank_choices", device)
    args = (indices, counts, largest, probs, row_map, sorted_probs, filled, choices, length, rows)
    _rank_choices(device, (segments, 1, 1), args, constants, config)
    return filled


def _spread_rows(
    role: str, source: torch.Tensor, row_map: torch.Tensor, filled: torch.Tensor, rows: int
) -> torch.Tensor:
    source, (tokens, top_k), device, columns = dense(source), row_map.shape, row_map.device, source.shape[1]
    target = empty(role, (rows, columns), source.dtype, device)
    if rows == 0 or columns == 0:
        return target
    (together, block), config, _ = _choice("spread_rows", device, columns)
    # Mostly there is nothing to be zeroed, so few programs see to it.
    others = min(blocks(rows, together), 2 * target_of(device).processors)
    grid = (blocks(tokens, together) + others, blocks(columns, block), 1)
    args = (source, row_map, filled, target, tokens, top_k, rows, columns)
    _spread(device, grid, args, (together, block), config)
    return target


@replayed()
def moe_unpermute(x: torch.Tensor, row_map: torch.Tensor, *, probs: torch.Tensor | None = None) -> torch.Tensor:
    """Gather and sum in fp32, in the order of the choices."""
    checks.moe_unpermute(x, row_map, probs)
    (tokens, top_k), columns, device = row_map.shape, x.shape[1], x.device
    out = empty("result", (tokens, columns), x.dtype, device)
    if tokens == 0 or columns == 0:
        return out
    constants, config, interpreted = _choice("gather_rows", device, columns)
    grid = (blocks(tokens, constants[0]), blocks(columns, constants[1]), 1)
    args = (dense(x), dense(row_map), None if probs is None else dense(probs), out, tokens, top_k, columns)
    unrolled = top_k if top_k <= _UNROLLED else 0
    _gather(device, grid, args, (unrolled, interpreted, *constants), config)
    return out


@replayed()
def moe_unpermute_bwd(
    dy: torch.Tensor, x: torch.Tensor, row_map: torch.Tensor, *, probs: torch.Tensor | None = None
) -> MoeUnpermuteBackward:
    """dinput's rows are written once each, as every row has one choice at most; dprobs are sums over features."""
    checks.moe_unpermute_bwd(dy, x, row_map, probs)
    (rows, columns), (tokens, top_k), device = x.shape, row_map.shape, x.device
    dinput = empty("dinput", (rows, columns), x.dtype, device)
    dprobs = None if probs is None else empty("dprobs", (tokens, top_k), probs.dtype, device)
    marks = empty("workspace", (max(rows, 1),), torch.uint8, device)
    (block,), config, _ = _choice("clear_marks", device)
    _clear_marks(device, (max(1, blocks(rows, block)), 1, 1), (marks, rows), (block,), config)
    if tokens and top_k:
        constants, config, interpreted = _choice("scatter_gradients", device, columns)
        args = (
            dense(dy), dense(x), dense(row_map), None if probs is None else dense(probs), dinput, dprobs, marks, tokens,
            top_k, columns,
        )  # fmt: skip
        _scatter(device, (blocks(tokens, constants[0]), 1, 1), args, (interpreted, *constants), config)
    if rows and columns:
        constants, config, _ = _choice("clear_rows", device, columns)
        _clear_rows(device, (blocks(rows, constants[0]), 1, 1), (marks, dinput, rows, columns), constants, config)
    return MoeUnpermuteBackward(dinput, dprobs)
