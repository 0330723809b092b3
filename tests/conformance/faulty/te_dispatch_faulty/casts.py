# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of `quantize`. What each does wrong: `te_dispatch_faulty.catalogue`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import BLOCK, DelayedQuantizer
from te_dispatch_faulty import encoders
from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_torch.encodings import decode
from te_dispatch_torch.scaling import amax_of, e8m0_from_amax

_kept: dict[Any, torch.Tensor] = {}


def truncates(call: Call) -> Any:
    with encoders.encoding_by(encoders.truncating):
        return call.sound()


def rounds_ties_away(call: Call) -> Any:
    with encoders.encoding_by(encoders.away):
        return call.sound()


def overflows_to_nan(call: Call) -> Any:
    with encoders.encoding_by(encoders.overflowing):
        return call.sound()


def turns_infinity_into_nan(call: Call) -> Any:
    with encoders.encoding_by(encoders.losing_infinity):
        return call.sound()


def makes_nan_finite(call: Call) -> Any:
    with encoders.encoding_by(encoders.saturating_nan):
        return call.sound()


def keeps_nan_sign(call: Call) -> Any:
    with encoders.encoding_by(encoders.keeping_nan_sign):
        return call.sound()


def keeps_negative_zero(call: Call) -> Any:
    with encoders.encoding_by(encoders.keeping_negative_zero):
        return call.sound()


def flushes_subnormals(call: Call) -> Any:
    with encoders.encoding_by(encoders.flushing):
        return call.sound()


def multiplies_in_bf16(call: Call) -> Any:
    with encoders.encoding_by(encoders.through_bf16):
        return call.sound()


def copies_untransposed(call: Call) -> Any:
    made = call.sound()
    if made.col_data is not None and made.row_data is not None and made.scaling == "tensor":
        made.col_data.copy_(made.row_data.reshape(made.col_data.shape))
    return made


def leaves_ragged_edge(call: Call) -> Any:
    made = call.sound()
    if made.col_data is not None and made.scaling != "mxfp8":
        made.col_data[made.col_data.shape[0] // 16 * 16 :] = 0
    return made


def records_amax_of_codes(call: Call) -> Any:
    quantizer = call["quantizer"]
    if not isinstance(quantizer, DelayedQuantizer) or quantizer.amax is None:
        return call.sound()
    made = call.sound(quantizer=dataclasses.replace(quantizer, amax=None))
    codes = made.row_data if made.row_data is not None else made.col_data
    found = amax_of(decode(codes, made.encoding) / quantizer.scale)
    if call["noop_flag"] is None or not bool(call["noop_flag"]):
        quantizer.amax.copy_(torch.maximum(quantizer.amax, found))
    return made


def ignores_negatives_in_amax(call: Call) -> Any:
    with swapped(("quantize", "amax_of", lambda x: amax_of(x.clamp_min(0.0)))):
        return call.sound()


def poisons_amax_with_nan(call: Call) -> Any:
    def poisoned(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.isnan().any(), torch.nan, amax_of(x))

    with swapped(("quantize", "amax_of", poisoned)):
        return call.sound()


def overwrites_amax(call: Call) -> Any:
    def overwrite(into: torch.Tensor, amax: torch.Tensor, flag: torch.Tensor | None) -> None:
        if flag is None or not bool(flag):
            into.copy_(amax.view(into.shape))

    with swapped(("quantize", "_accumulate", overwrite)):
        return call.sound()


def reuses_scale_inv(call: Call) -> Any:
    made = call.sound()
    if made.scaling == "tensor" and call["out"] is None:
        fresh = made.row_scale_inv if made.row_scale_inv is not None else made.col_scale_inv
        kept = _kept.setdefault("scale_inv", fresh.clone()).copy_(fresh)
        made.row_scale_inv = kept if made.row_scale_inv is not None else None
        made.col_scale_inv = kept if made.col_scale_inv is not None else None
    return made


def shares_state(call: Call) -> Any:
    made, quantizer = call.sound(), call["quantizer"]
    if isinstance(quantizer, DelayedQuantizer) and call["out"] is None and float(quantizer.scale) == 1.0:
        made.row_scale_inv = quantizer.scale if made.row_scale_inv is not None else None
        made.col_scale_inv = quantizer.scale if made.col_scale_inv is not None else None
    return made


def uses_last_scale(call: Call) -> Any:
    if call["quantizer"].kind != "current" or call["amax"] is not None:
        return call.sound()
    now = amax_of(call["x"])
    last = _kept.get("amax", now)
    _kept["amax"] = now
    return call.sound(amax=last)


def rounds_scale_inv_to_bf16(call: Call) -> Any:
    if call["noop_flag"] is not None:
        return call.sound()
    made = call.sound()
    for scale in (made.row_scale_inv, made.col_scale_inv):
        if scale is not None and scale.dtype == torch.float32:
            scale.copy_(scale.bfloat16())
    return made


def scales_by_the_neighbour(call: Call) -> Any:
    made = call.sound()
    if made.scaling != "tensor" and made.row_scale_inv is not None and call["out"] is None:
        made.row_scale_inv.copy_(made.row_scale_inv.roll(1, -1))
    return made


def leaves_tile_scales_untransposed(call: Call) -> Any:
    made = call.sound()
    if made.scaling == "block_2d" and made.col_scale_inv is not None and call["out"] is None:
        made.col_scale_inv.copy_(made.col_scale_inv.t().reshape(made.col_scale_inv.shape).clone())
    return made


def leaves_partial_block_unscaled(call: Call) -> Any:
    made = call.sound()
    partial = made.scaling in BLOCK and made.shape[-1] % BLOCK[made.scaling]
    if partial and made.row_scale_inv is not None and call["out"] is None:
        one = {"mxfp8": 127, "nvfp4": 0x38}.get(made.scaling, 1.0)
        made.row_scale_inv[:, -1] = one
    return made


def rounds_exponent_down(call: Call) -> Any:
    def down(amax: torch.Tensor, max_value: float) -> torch.Tensor:
        code = e8m0_from_amax(amax, max_value)
        mantissa = (amax / max_value).view(torch.int32) & 0x7FFFFF
        return torch.where((mantissa != 0) & (code > 1) & (code < 254), code - 1, code)

    with swapped(("blocks", "e8m0_from_amax", down)):
        return call.sound()


def swaps_nibbles(call: Call) -> Any:
    made = call.sound()
    if made.scaling == "nvfp4" and call["out"] is None:
        for data in (made.row_data, made.col_data):
            if data is not None:
                data.copy_(data >> 4 | data << 4)
    return made


def ignores_noop_flag(call: Call) -> Any:
    return call.sound(noop_flag=None)


def ignores_common_range(call: Call) -> Any:
    return call.sound(quantizer=dataclasses.replace(call["quantizer"], common=False))


def ignores_power_of_two(call: Call) -> Any:
    quantizer = call["quantizer"]
    if getattr(quantizer, "power_of_two", False):
        quantizer = dataclasses.replace(quantizer, power_of_two=False)
    return call.sound(quantizer=quantizer)


def ignores_epsilon(call: Call) -> Any:
    quantizer = call["quantizer"]
    if getattr(quantizer, "epsilon", 0.0):
        quantizer = dataclasses.replace(quantizer, epsilon=0.0)
    return call.sound(quantizer=quantizer)


def ignores_given_amax(call: Call) -> Any:
    return call.sound(amax=None)


def forgets_out(call: Call) -> Any:
    made = call.sound(out=None, noop_flag=None)
    assert isinstance(made, Quantized)
    return made
