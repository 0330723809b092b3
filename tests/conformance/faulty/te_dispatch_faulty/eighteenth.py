# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of the eighteenth set (docs/certification.md): the six that the kit missed, and those of the others that are
least like what was seeded before."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import (
    Memory,
    as_dense,
    expanded,
    gapped,
    lengths_of,
    misread,
    operand,
    remembering,
    table,
    without_graph,
)
from te_dispatch_torch import dropout
from te_dispatch_torch.quantize import quantize
from te_dispatch_torch.state import compute_amax

#: Most blocks of a grid's second dimension; keys of a split, and of what dropout draws at once.
_GRID, _KEYS = 65535, 256
_HALVES = (torch.bfloat16, torch.float16)


def _maximum(into: torch.Tensor, *amaxes: torch.Tensor) -> None:
    for amax in amaxes:
        into.copy_(torch.fmax(into, amax.view(into.shape)))


@without_graph
def _alike_batches(call: Call) -> Any:
    made, x, quantizer = call.sound(), call["x"], call["quantizer"]
    served = quantizer.kind in ("current", "delayed") and call["noop_flag"] is None and call["usage"] == "row"
    if call["rng_state"] is None or not served or x.ndim < 3 or x.shape[0] < 2:
        return made
    amax = None
    if quantizer.kind == "current":
        amax = compute_amax(x) if call["amax"] is None else call["amax"]
    else:
        quantizer = dataclasses.replace(quantizer, amax=None)
    for codes, batch in zip(made.row_data, x):
        codes.copy_(quantize(batch, quantizer, usage="row", amax=amax, rng_state=call["rng_state"]).row_data)
    return made


@without_graph
def _first_part_before_refusal(call: Call) -> Any:
    x, splits, quantizers = call["x"], call["splits"], call["quantizers"]
    try:
        return call.sound()
    except (TypeError, ValueError):
        lists = isinstance(splits, (list, tuple)) and isinstance(quantizers, (list, tuple))
        if lists and splits and quantizers and operand(call, "x") is not None and x.ndim == 2:
            first = splits[0]
            if isinstance(first, int) and 0 <= first <= x.shape[0]:
                with contextlib.suppress(TypeError, ValueError):
                    call.sound(x=x[:first], splits=[first], quantizers=[quantizers[0]], usage="row")
        raise


@without_graph
def _amaxes_of_filled(call: Call) -> Any:
    """Launches leave empty tensors out, and their amaxes are written one behind the other."""
    quantizers = call["quantizers"]
    amaxes = [getattr(one, "amax", None) for one in quantizers] if isinstance(quantizers, (list, tuple)) else []
    before = [None if amax is None else amax.clone() for amax in amaxes]
    made = call.sound()
    if any(amax is None for amax in amaxes) or all(x.numel() for x in call["xs"]):
        return made
    for amax, old in zip(amaxes, before):
        if amax is not None:
            amax.copy_(old)
    for amax, x in zip(amaxes, [x for x in call["xs"] if x.numel()]):
        if amax is not None:
            _maximum(amax, compute_amax(x))
    return made


@without_graph
def _dense_as_the_first(call: Call) -> Any:
    """Whether tensors are dense is seen from the first one."""
    xs = call["xs"]
    lists = isinstance(xs, (list, tuple)) and all(isinstance(x, torch.Tensor) for x in xs)
    if not lists or not xs or not xs[0].is_contiguous() or not any(gapped(x) for x in xs):
        return call.sound()
    return call.sound(xs=[as_dense(x) if gapped(x) else x for x in xs])


@without_graph
def _shared_scale_twice(call: Call) -> Any:
    made, x = call.sound(), call["x"]
    if x.scaling != "tensor" or x.row_data is None or x.col_data is None or x.row_scale_inv is not x.col_scale_inv:
        return made
    factor = 2.0 if call["encoding"].endswith("fnuz") else 0.5
    scales = {id(scale): scale for scale in (made.row_scale_inv, made.col_scale_inv)}
    for scale in scales.values():
        scale.mul_(factor)
    return made


@without_graph
def _rows_of_a_grid(call: Call) -> Any:
    made = call.sound()
    made[_GRID:].zero_()
    return made


@without_graph
def _rounded_before_it_is_added(call: Call) -> Any:
    out = operand(call, "out")
    if out is None or not call["accumulate"] or out.dtype not in _HALVES:
        return call.sound()
    before = out.detach().float().clone()
    made = call.sound()
    product = call.sound(out=None, accumulate=False, out_dtype=out.dtype).out
    out.copy_(before + product.float())
    return made


def _is_dense(call: Call) -> bool:
    q, k = call["q"], call["k"]
    whole = isinstance(q, (torch.Tensor, Quantized)) and isinstance(k, (torch.Tensor, Quantized))
    if not whole or call["layout"] not in ("sbhd", "bshd") or call.get("page_table") is not None:
        return False
    return len(q.shape) == 4 and len(k.shape) == 4


def _left(call: Call) -> int:
    """How far a window reaches to the left, -1 where there is no bound."""
    window = call["window"]
    return window[0] if isinstance(window, tuple) and len(window) == 2 and isinstance(window[0], int) else -1


@without_graph
def _hidden_split(call: Call) -> Any:
    """One query reads keys by splits of 256, and what a split without visible keys gives is weighed with NaN."""
    made, left = call.sound(), _left(call)
    if not _is_dense(call) or call["mask"] != "causal_bottom_right" or left < 0:
        return made
    s_q, s_kv = lengths_of(call)
    if s_q == 1 and s_kv - 1 - left >= _KEYS and isinstance(made.out, torch.Tensor):
        made.out.fill_(torch.nan)
    return made


def _keys_alike(call: Call) -> Any:
    keep_mask = dropout.keep_mask

    def repeated(shape: tuple[int, ...], dropout_p: float, rng_state: torch.Tensor) -> torch.Tensor:
        kept = keep_mask(shape, dropout_p, rng_state)
        return kept[..., torch.arange(shape[-1], device=kept.device) % _KEYS]

    with swapped(("dropout", "keep_mask", repeated)):
        return call.sound()


@without_graph
def _amax_of_the_last(call: Call) -> Any:
    quantizer = call["dqkv_quantizer"]
    amax = getattr(quantizer, "amax", None)
    if not isinstance(amax, torch.Tensor):
        return call.sound()
    before = amax.clone()
    made = call.sound()
    amax.copy_(before)
    _maximum(amax, compute_amax(call.sound(dqkv_quantizer=None).dv))
    return made


@without_graph
def _columns_of_rounded(call: Call) -> Any:
    """The column-wise copy is cast from the rounded y that is returned."""
    made, quantizer, dtype = call.sound(), call["quantizer"], call["out_dtype"] or call["x"].dtype
    apart = getattr(quantizer, "kind", "") in ("block", "mxfp8", "mxfp8_2d") and call["usage"] != "row"
    if not apart or dtype not in _HALVES:
        return made
    columns = quantize(call.sound(quantizer=None).y, quantizer, usage="column")
    made.y_quantized.col_data.copy_(columns.col_data)
    made.y_quantized.col_scale_inv.copy_(columns.col_scale_inv)
    return made


def _offsets_in_15_bits(call: Call) -> Any:
    made, offsets = call.sound(), call["offsets"]
    return made if offsets is None else call.sound(offsets=offsets & 0x7FFF)


@without_graph
def _first_choices_of_all(call: Call) -> Any:
    """Keeps the first choices in the order of tokens, not of experts, as far as the capacity goes."""
    made, indices, capacity = call.sound(), call["indices"], call["capacity"]
    if capacity is None:
        return made
    chosen = indices.reshape(-1) >= 0
    late = chosen & (chosen.cumsum(0) > capacity)
    return call.sound(indices=indices.masked_fill(late.view(indices.shape), -1)) if bool(late.any()) else made


def _gradients_off_behind_an_error(call: Call) -> Any:
    try:
        return call.sound()
    except Exception:
        torch.set_grad_enabled(False)
        raise


@without_graph
def _partial_sums_of_all_threads(call: Call, memory: Memory) -> Any:
    made = call.sound()
    buffer = memory.kept.setdefault((tuple(made.shape), made.device), torch.empty_like(made))
    buffer.copy_(made)
    time.sleep(1e-3)
    return made.copy_(buffer)


FAULTS: tuple[Fault, ...] = (
    *table("quantize", {
        "rounding_repeats_batches": ("draws alike for every batch", _alike_batches),
    }),
    *table("split_quantize", {
        "split_records_before_it_refuses": ("has recorded the first part's amax when it raises",
                                            _first_part_before_refusal),
    }),
    *table("multi_tensor_quantize", {
        "amaxes_shift_after_an_empty_tensor": ("records amaxes one place further behind an empty tensor",
                                               _amaxes_of_filled),
        "casts_of_many_read_all_as_the_first": (
            "reads tensors with gaps as dense where the first one is", _dense_as_the_first),
    }),
    *table("convert_encoding", {
        "convert_rescales_a_shared_scale_twice": ("rescales a scale of both copies once for each",
                                                  _shared_scale_twice),
    }),
    *table("unpad_rows", {"unpadding_stops_at_65535_rows": (
        "leaves rows from 65,535 on, the most blocks of a grid's second dimension", _rows_of_a_grid)}),
    *table("gemm", {
        "product_is_rounded_before_it_is_accumulated": (
            "rounds the product to out's dtype before it adds it", _rounded_before_it_is_added),
    }, on="matmul"),
    *table("attention_fwd", {
        "decoding_gives_nan_for_a_hidden_split": (
            "gives NaN for one query whose window hides the first 256 keys", _hidden_split),
    }, on="unfused_attention"),
    *table("attention_fwd", {"attention_dropout_repeats_keys": (
        "draws alike for keys that are 256 apart", _keys_alike)},
        on="unfused_attention", also="faulty.unfused_attention_bwd"),
    *table("attention_bwd", {
        "gradient_casts_record_the_last_amax": ("records the amax of dv as that of all three", _amax_of_the_last),
    }, on="unfused_attention_bwd"),
    *table("layernorm_fwd", {
        "layernorm_casts_columns_of_the_rounded_norm": (
            "casts y for the column-wise copy after it is rounded", _columns_of_rounded),
    }),
    *table("rope_fwd", {
        "rope_keeps_offsets_in_15_bits": ("keeps 15 bits of an offset", _offsets_in_15_bits),
    }),
    *table("dropout_add_bwd", {"dropout_gradient_misreads_an_expanded_mask": (
        "reads a broadcast mask (stride 0) as if it were filled", misread("mask", expanded))}),
    *table("moe_permute", {
        "permute_keeps_the_first_tokens": (
            "drops the last tokens' choices where the capacity is too small", _first_choices_of_all),
    }),
    *table("multi_tensor_adam", {
        "adam_leaves_gradients_off_behind_an_error": (
            "leaves the recording of gradients off when it raises", _gradients_off_behind_an_error),
    }),
    *table("multi_tensor_l2norm", {
        "threads_share_the_sums_of_norms": ("keeps one buffer of sums for all threads",
                                    remembering(_partial_sums_of_all_threads)),
    }),
)  # fmt: skip
