# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of the rest of the quantize family. What each does wrong: `te_dispatch_faulty.catalogue`."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.encodings import encoding as find_encoding
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import CurrentQuantizer
from te_dispatch.ops import alloc
from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_torch.quantize import cast, dequantize
from te_dispatch_torch.scaling import amax_of


def sums_dbias_in_bf16(call: Call) -> Any:
    made = call.sound()
    total = torch.zeros(made.dbias.shape, dtype=torch.bfloat16, device=made.dbias.device)
    for row in call["x"].reshape(-1, call["x"].shape[-1]):
        total = (total.float() + row.float()).bfloat16()
    made.dbias.copy_(total)
    return made


def sums_dbias_of_codes(call: Call) -> Any:
    made = call.sound()
    values = dequantize(made.quantized, dtype=torch.float32)
    made.dbias.copy_(values.reshape(-1, values.shape[-1]).sum(0))
    return made


def dequantizes_through_bf16(call: Call) -> Any:
    result = call.sound()
    return result.copy_(call.sound(dtype=torch.bfloat16))


def leaves_scales_untransposed(call: Call) -> Any:
    made = call.sound()
    if made.scaling == "block_2d":
        made.col_scale_inv = made.row_scale_inv.clone().reshape(made.col_scale_inv.shape)
    return made


def _apart(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy in memory from the allocator."""
    if tensor is None:
        return None
    return alloc.empty("out", tuple(tensor.shape), tensor.dtype, tensor.device).copy_(tensor)


def copies_the_row_wise_record(call: Call) -> Any:
    made = call.sound()
    made.row_data, made.row_scale_inv = _apart(made.row_data), _apart(made.row_scale_inv)
    return made


def copies_laid_out_codes(call: Call) -> Any:
    sound = call.sound()
    # A new record: of the same layout the sound one is x itself.
    made = Quantized(**{name: getattr(sound, name) for name in Quantized.__slots__})
    made.row_data, made.col_data = _apart(made.row_data), _apart(made.col_data)
    return made


def leaves_layout_padding(call: Call) -> Any:
    x, made = call["x"], call.sound()
    if made.row_scale_inv is None or made.scaling not in ("block_1d", "block_2d"):
        return made
    if call["scale_layout"] == CANONICAL_SCALES or x.scale_layout != CANONICAL_SCALES:
        return made
    scales = x.row_scale_inv.t() if made.scaling == "block_1d" else x.row_scale_inv
    raw = alloc.empty("row_scale_inv", tuple(made.row_scale_inv.shape), torch.float32, made.row_scale_inv.device)
    raw[: scales.shape[0], : scales.shape[1]] = scales
    made.row_scale_inv = raw
    return made


def converts_without_rescaling(call: Call) -> Any:
    made = call.sound()
    for name in ("row_scale_inv", "col_scale_inv"):
        if getattr(made, name) is not None:
            getattr(made, name).copy_(getattr(call["x"], name))
    return made


def counts_nan_as_overflow(call: Call) -> Any:
    def beyond(codes: torch.Tensor, target: str) -> torch.Tensor:
        return ((codes & 0x7F) > find_encoding(target).max_code) | (codes == 0x80)

    with swapped(("state", "_beyond", beyond)):
        return call.sound()


def keeps_infinity(call: Call) -> Any:
    def to_fnuz(codes: torch.Tensor, source: str) -> torch.Tensor:
        nan = (codes & 0x7F) > (0x7E if source == "e4m3fn" else 0x7C)
        return torch.where(nan, 0x80, torch.where(codes == 0x80, 0, codes)).to(torch.uint8)

    with swapped(("state", "_to_fnuz", to_fnuz)):
        return call.sound()


def counts_before_it_raises(call: Call) -> Any:
    try:
        return call.sound()
    except ValueError:
        if call["count"] is not None:
            call["count"].add_(1)
        raise


def leaves_garbage_in_padding(call: Call) -> Any:
    made = call.sound()
    raw = alloc.empty("out", tuple(made.shape), made.dtype, made.device)
    start = 0
    for rows, padded in zip(call["splits"], call["padded_splits"]):
        raw[start : start + rows] = made[start : start + rows]
        start += padded
    return raw


def skips_no_padding(call: Call) -> Any:
    made = call.sound()
    return made.copy_(call["x"][: made.shape[0]])


def drops_last_elements(call: Call) -> Any:
    x = call["x"].reshape(-1)
    return call.sound(x=x[: x.numel() // 8 * 8])


def clears_missed_blocks(call: Call) -> Any:
    before = call["amax"].clone()
    call["amax"].zero_()
    made = call.sound()
    return made.copy_(torch.where(made == 0, made, torch.maximum(made, before)))


def ignores_start(call: Call) -> Any:
    return call.sound(start=0)


def rolls_idle_columns(call: Call) -> Any:
    idle = [history[0] == 0 for history in call["histories"]]
    call.sound()
    for history, columns in zip(call["histories"], idle):
        history.copy_(torch.where(columns, torch.cat((history[1:], history[:1])), history))


def ignores_margin(call: Call) -> Any:
    return call.sound(margin=0)


def takes_the_most_recent(call: Call) -> Any:
    return call.sound(algorithm="most_recent")


def skips_last_history(call: Call) -> Any:
    count = max(len(call["histories"]) - 1, 1)
    amaxes = call["amaxes"]
    return call.sound(
        histories=call["histories"][:count], scales=call["scales"][:count], max_values=call["max_values"][:count],
        amaxes=None if amaxes is None else amaxes[:count],
    )  # fmt: skip


def casts_with_first(call: Call) -> Any:
    return call.sound(quantizers=[call["quantizers"][0]] * len(call["quantizers"]))


def shares_one_amax(call: Call) -> Any:
    xs, quantizers = call["xs"], call["quantizers"]
    if not isinstance(quantizers[0], CurrentQuantizer):
        return call.sound()
    amax = torch.stack([amax_of(x) for x in xs]).amax(0)
    return call.delivered([cast(x, q, call["usage"], x.dtype, amax) for x, q in zip(xs, quantizers)])
