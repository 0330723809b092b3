# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults that show in what lies beside a result, or lasts behind a call: padding of scales, sizes that one launch does
not hold, what is kept under a key that says too little, and state of the process."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from typing import Any

import torch

from te_dispatch.ops.activation import GATED
from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Memory, columns_from, remembering, spoil, spoiled, table
from te_dispatch_torch import dropout

#: Entries that the caches here keep.
_KEPT = 4


def _kept(memory: Memory, key: Any, value: torch.Tensor) -> torch.Tensor:
    """What a cache has under a key: the first value that it was given."""
    if key not in memory.kept:
        with torch.inference_mode(False), torch.no_grad():
            memory.kept[key] = value.detach().clone()
        while len(memory.kept) > _KEPT:
            memory.kept.pop(next(iter(memory.kept)))
    found: torch.Tensor = memory.kept[key]
    return found


# -- padding and sizes -------------------------------------------------------------------------------------------------


def _leaves_padding(call: Call) -> Any:
    """Leaves what `out` has behind the scales of a laid-out cast."""
    out, layout = call["out"], getattr(call["quantizer"], "scale_layout", "canonical")
    if out is None or layout not in ("gemm_1d", "gemm_2d"):
        return call.sound()
    rows, columns = math.prod(out.shape[:-1]), out.shape[-1]
    ends = (rows, columns) if layout == "gemm_1d" else (-(-columns // 128), -(-rows // 128))
    scales = [(s, end) for s, end in zip((out.row_scale_inv, out.col_scale_inv), ends) if s is not None]
    before = [scale[:, end:].clone() for scale, end in scales]
    made = call.sound()
    with torch.no_grad():
        for (scale, end), old in zip(scales, before):
            scale[:, end:].copy_(old)
    return made


def _padded_as_compact(call: Call) -> Any:
    """Reads column-wise scales that are laid out as if their rows had no padding."""
    x, made = call["x"], call.sound()
    if x.scale_layout != "gemm_1d" or call["scale_layout"] != "canonical" or x.col_scale_inv is None:
        return made
    columns, blocks = made.col_scale_inv.shape
    with torch.no_grad():
        flat = x.col_scale_inv.detach().reshape(-1)[: columns * blocks]
        made.col_scale_inv.copy_(flat.view(blocks, columns).t())
    return made


def _amaxes_by_size(call: Call) -> Any:
    """Records amaxes in the order of the tensors' sizes."""
    xs, quantizers = call["xs"], call["quantizers"]
    if len(xs) != len(quantizers) or any(getattr(quantizer, "amax", None) is None for quantizer in quantizers):
        return call.sound()
    order = sorted(range(len(xs)), key=lambda i: xs[i].numel())
    dealt = [dataclasses.replace(q, amax=quantizers[order[i]].amax) for i, q in enumerate(quantizers)]
    return call.sound(quantizers=dealt)


def _updates_2_18(call: Call) -> Any:
    """Updates 2^18 elements of a tensor."""
    lists = [call[name] for name in ("params", "exp_avgs", "exp_avg_sqs", "master") if call[name] is not None]
    long = [x for tensors in lists for x in tensors if x.numel() > 1 << 18]
    before = [x.detach().clone() for x in long]
    made = call.sound()
    with torch.no_grad():
        for x, old in zip(long, before):
            new = x.detach().reshape(-1).clone()
            new[1 << 18 :] = old.reshape(-1)[1 << 18 :]
            x.copy_(new.view(x.shape))
    return made


def _amax_of_2_20(call: Call) -> Any:
    """Reads 2^20 elements."""
    x = call["x"].detach()
    return call.sound(x=x.reshape(-1)[: 1 << 20]) if x.numel() > 1 << 20 else call.sound()


def _wide_gate(call: Call) -> bool:
    return call["kind"] in GATED and call["x"].shape[-1] > 1 << 16


# -- kept under too little ---------------------------------------------------------------------------------------------


def _mask_by_state(call: Call, memory: Memory) -> Any:
    """Keeps masks by the random state and the number of elements, and not by the probability."""
    sound = dropout.keep_mask

    def kept(shape: tuple[int, ...], p: float, state: torch.Tensor) -> torch.Tensor:
        key = (tuple(state.tolist()), math.prod(shape))
        mask = memory.kept.get(key)
        return _kept(memory, key, sound(shape, p, state.clone()) if mask is None else mask).reshape(shape).clone()

    with swapped(("dropout", "keep_mask", kept)):
        return call.sound()


def _order_by_loads(call: Call, memory: Memory) -> Any:
    """Keeps the order of choices by how many each expert has."""
    indices = call["indices"]
    if not isinstance(indices, torch.Tensor) or indices.ndim != 2 or not indices.numel():
        return call.sound()
    key = (tuple(indices.shape), indices.dtype, call["capacity"], tuple(sorted(indices.reshape(-1).tolist())))
    return call.sound(indices=_kept(memory, key, indices))


def _rows_by_loads(call: Call, memory: Memory) -> Any:
    """Keeps the map of rows by the rows that are in it."""
    row_map = call["row_map"]
    if not isinstance(row_map, torch.Tensor) or row_map.ndim != 2 or not row_map.numel():
        return call.sound()
    key = (tuple(row_map.shape), tuple(call["x"].shape), tuple(sorted(row_map.reshape(-1).tolist())))
    return call.sound(row_map=_kept(memory, key, row_map))


def _sines_by_first_angle(call: Call, memory: Memory) -> Any:
    """Keeps sines of finite tables by their size and the second position's first angle."""
    freqs = call["freqs"]
    if freqs.ndim != 4 or freqs.shape[0] < 2 or not freqs.numel() or not bool(freqs.isfinite().all()):
        return call.sound()
    key = (tuple(freqs.shape), freqs.dtype, call["interleaved"], float(freqs.detach()[1, 0, 0, 0]))
    return call.sound(freqs=_kept(memory, key, freqs))


def _announced_early(call: Call, memory: Memory) -> Any:
    """Makes what a shape needs in its first call, and announces it before it is filled."""
    key = (tuple(call["x"].shape), call["layout"], call["interleaved"])
    there = memory.kept.get(key)
    if there is None:
        memory.kept[key] = "filling"
        time.sleep(0.005)
        memory.kept[key] = "filled"
    made = call.sound()
    if there == "filling":
        spoil(made)
    return made


# -- left behind -------------------------------------------------------------------------------------------------------


def _logs(call: Call) -> Any:
    made = call.sound()
    logging.basicConfig(level=logging.INFO)
    return made


def _opens(call: Call) -> Any:
    made = call.sound()
    os.open(os.devnull, os.O_RDONLY)
    return made


def _prints(call: Call) -> Any:
    made = call.sound()
    torch.set_printoptions(precision=7, sci_mode=True)
    return made


def _silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return x * torch.sigmoid(x)


def _replaces_silu(call: Call) -> Any:
    made = call.sound()
    torch.nn.functional.silu = _silu
    return made


FAULTS: tuple[Fault, ...] = (
    *table("quantize", {"leaves_padding_of_out": ("does not write the padding of laid-out scales", _leaves_padding)}),
    *table("relayout_scales", {"padded_scales_as_compact": (
        "reads padded column-wise scales as compact ones", _padded_as_compact)}),
    *table("multi_tensor_quantize", {"amaxes_in_order_of_size": (
        "records amaxes in the order of the tensors' sizes", _amaxes_by_size)}),
    *table("multi_tensor_adam", {"updates_2_18_elements": ("updates 2^18 elements of a tensor", _updates_2_18)}),
    *table("compute_amax", {"amax_of_2_20_elements": ("reads 2^20 elements", _amax_of_2_20)}),
    *table("activation_fwd", {"gates_32768_columns": (
        "is wrong beyond 32,768 gated columns", spoiled("out", columns_from(1 << 15), on=_wide_gate))}),
    *table("moe_unpermute", {
        "unpermutes_16384_columns": ("is wrong beyond 16,384 columns", spoiled("", columns_from(1 << 14))),
        "row_map_by_its_rows": ("keeps the map of rows by the rows in it", remembering(_rows_by_loads)),
        "configures_logging": ("configures Python's logging", _logs),
    }),
    *table("moe_permute", {"order_by_loads": (
        "keeps the order of choices by how many each expert has", remembering(_order_by_loads))}),
    *table("dropout_add_fwd", {"masks_by_state": (
        "keeps masks by the random state, and not by the probability", remembering(_mask_by_state))}),
    *table("rope_bwd", {"sines_by_first_angle": (
        "keeps sines by the size of their table and its first angle", remembering(_sines_by_first_angle))}),
    *table("rope_fwd", {"announces_sines_early": (
        "announces what a shape needs before it is filled", remembering(_announced_early))}),
    *table("dropout_add_bwd", {"leaves_files_open": ("opens a file in each call and leaves it open", _opens)}),
    *table("rmsnorm_bwd", {"leaves_options_of_printing": ("leaves other options of printing", _prints)}),
    *table("layernorm_bwd", {"replaces_a_function": ("replaces torch.nn.functional.silu", _replaces_silu)}),
)  # fmt: skip
