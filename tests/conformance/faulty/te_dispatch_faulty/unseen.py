# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults that need two things at once which no case of the kit had together until a third adversary looked."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops import alloc
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import given, off, operand, spoiled, table, when, where, with_, with_members


def _packed_ragged(call: Call) -> bool:
    return call["packing"] is not None and call["layout"] == "thd"


def _shared_keys(call: Call) -> bool:
    return call["packing"] in ("2hd", "h2d") and call["q"].shape[-2] != call["k"].shape[-2]


def _swapped(call: Call) -> Any:
    """Writes the gradient of k where that of v belongs, and the other way round."""
    made = call.sound()
    if _packed_ragged(call) and made.dk.shape == made.dv.shape:
        of_k = made.dk.clone()
        made.dk.copy_(made.dv)
        made.dv.copy_(of_k)
    return made


def _apart(call: Call) -> Any:
    """Gradients in memory of their own; those that are cast stay as they are."""
    made = call.sound()
    if not _packed_ragged(call) or call["dqkv_quantizer"] is not None:
        return made

    def fresh(x: torch.Tensor) -> torch.Tensor:
        return alloc.empty("gradient", tuple(x.shape), x.dtype, x.device).copy_(x)

    return made._replace(dq=fresh(made.dq), dk=fresh(made.dk), dv=fresh(made.dv))


def _codes_apart(call: Call) -> Any:
    """Casts gradients one by one, each into codes of its own."""
    if call["packing"] is None or call["dqkv_quantizer"] is None:
        return call.sound()
    return call.sound(packing=None)


def _dropped(call: Call) -> bool:
    return call["dropout_p"] > 0


def _offset_gradient_undropped(call: Call) -> Any:
    """The gradient of the offset as if nothing had been dropped."""
    made = call.sound()
    if made.dsoftmax_offset is not None and _dropped(call):
        made.dsoftmax_offset.copy_(call.sound(dropout_p=0.0, rng_state=None).dsoftmax_offset)
    return made


def _nan_times_nothing(call: Call) -> Any:
    """Multiplies the gradient of rows that see nothing, inside of sequences, by weights of 0."""
    made, dout, lse = call.sound(), operand(call, "dout"), call["lse"]
    if dout is None or call["layout"] == "thd" or call["mask"].startswith("padding") or made.dv.dtype == torch.uint8:
        return made
    rows = dout.permute((0, 2, 1, 3) if call["layout"] == "bshd" else (1, 2, 0, 3))
    if bool((rows.isnan() & (lse == -torch.inf).unsqueeze(-1)).any()):
        made.dv.fill_(torch.nan)
    return made


def _nan_times_hidden(call: Call) -> Any:
    """The same, where it is a window or the alignment to the last key, and no mask of the caller, that hides all."""
    return call.sound() if call["mask"] == "arbitrary" else _nan_times_nothing(call)


def _maximum_without_nan(call: Call) -> Any:
    """The largest number among the logits of a head, NaN left out."""
    made, k = call.sound(), operand(call, "k")
    if made.max_logit is not None and k is not None:
        made.max_logit.copy_(call.sound(k=k.nan_to_num()).max_logit)
    return made


def _scale_replaced(call: Call) -> Any:
    """Puts a tensor of its own into the caller's record."""
    made, out = call.sound(), call["out"]
    if out is not None and out.col_scale_inv is not None and made.col_scale_inv is not None:
        scale = out.col_scale_inv
        fresh = alloc.empty("col_scale_inv", tuple(scale.shape), scale.dtype, scale.device).copy_(scale)
        out.col_scale_inv = made.col_scale_inv = fresh
    return made


def _one_scale_written(call: Call) -> Any:
    """Takes the scales of a record's two copies for one tensor."""
    out = call["out"]
    if out is None or out.scaling != "tensor" or out.col_scale_inv is None or call["usage"] != "both":
        return call.sound()
    before = out.col_scale_inv.clone()
    made = call.sound()
    if out.col_scale_inv is not out.row_scale_inv:
        out.col_scale_inv.copy_(before)
    return made


def _first_tiles(x: Any) -> Any:
    """A record whose tiles of scales are all the first one."""
    if not isinstance(x, Quantized) or x.scale_layout != "swizzled_32x4x4":
        return x

    def repeated(scale: torch.Tensor | None) -> torch.Tensor | None:
        if scale is None or not scale.numel():
            return scale
        return scale.reshape(-1, 512)[:1].expand(scale.numel() // 512, 512).reshape(scale.shape)

    return with_members(x, row_scale_inv=repeated(x.row_scale_inv), col_scale_inv=repeated(x.col_scale_inv))


def _one_tile(call: Call) -> Any:
    return call.sound(a=_first_tiles(call["a"]), b=_first_tiles(call["b"]))


def _one_tile_each(call: Call) -> Any:
    return call.sound(a=[_first_tiles(x) for x in call["a"]], b=[_first_tiles(x) for x in call["b"]])


def _one_row_further(call: Call) -> Any:
    """Deals each row one further where the splits do not lie adjacent."""
    splits, a = call["splits"], call["a"][0]
    if not isinstance(splits, torch.Tensor) or splits.is_contiguous():
        return call.sound()
    if isinstance(a, torch.Tensor):
        return call.sound(a=[a.roll(1, 0)])
    row, column = (data if data is None else data.roll(1, dim) for dim, data in enumerate((a.row_data, a.col_data)))
    return call.sound(a=[with_members(a, row_data=row, col_data=column)])


def _short_in_one_row(call: Call) -> Any:
    """Of a shard that is shorter than a row, sees what lies in the first of two rows of blocks."""
    count, width, start, block = call["x"].numel(), call["width"], call["start"], call["block"]
    if not block or not 0 < count < width or start // width // block == (start + count - 1) // width // block:
        return call.sound()
    return call.sound(x=call["x"][: width - start % width])


def _infinity_as_largest(call: Call) -> Any:
    """Reads e5m2's code of Inf as its largest number."""
    return call.sound(a=_without_infinity(call["a"]), b=_without_infinity(call["b"]))


def _without_infinity(x: Any) -> Any:
    if not isinstance(x, Quantized) or x.encoding != "e5m2":
        return x
    row, column = (
        data if data is None else torch.where((data & 0x7F) == 0x7C, data - 1, data)
        for data in (x.row_data, x.col_data)
    )
    return with_members(x, row_data=row, col_data=column)


def _start_in_32_bits(call: Call) -> Any:
    return call.sound(start=call["start"] % 2**32)


def _offsets_of_empty(call: Call) -> torch.Tensor:
    offsets: torch.Tensor = call["offsets"].clone()
    for place in (call["cu_seqlens"].diff()[:-1] == 0).nonzero().flatten().tolist():
        offsets[place + 1] = offsets[place]
    return offsets


FAULTS: tuple[Fault, ...] = (
    *table("attention_fwd", {
        "packed_ragged_attention_reads_keys_as_values": (
            "reads k for v where ragged operands are packed", lambda call: (
                call.sound(v=call["k"]) if _packed_ragged(call) and call["k"].shape == call["v"].shape
                else call.sound())),
        "dropped_attention_has_no_sink": (
            "leaves a learnable offset out where elements are dropped", when(
                where(_dropped, given(softmax_type="learnable")),
                with_(softmax_type="vanilla", softmax_offset=None))),
        "largest_logit_leaves_nan_out": ("gives the largest logit beside NaN", _maximum_without_nan),
    }, on="unfused_attention"),
    *table("attention_bwd", {
        "packed_ragged_gradients_are_swapped": ("swaps dk and dv where ragged operands are packed", _swapped),
        "packed_ragged_gradients_lie_apart": ("returns gradients apart where ragged operands are packed", _apart),
        "packed_gradients_are_cast_apart": ("packs no gradients that it casts", _codes_apart),
        "packed_keys_of_groups_are_wrong": (
            "is wrong in dk where packed keys serve several heads", spoiled("dk", change=off, on=_shared_keys)),
        "offset_gradient_forgets_dropout": (
            "gives the offset its gradient without dropout", _offset_gradient_undropped),
        "gradient_of_blind_rows_spreads": ("multiplies NaN in rows that see nothing by 0", _nan_times_nothing),
        "gradient_of_hidden_rows_spreads": (
            "multiplies NaN by 0 in rows that a window or an alignment hides all keys of", _nan_times_hidden,
        ),
    }, on="unfused_attention_bwd"),
    *table("rope_fwd", {"rope_takes_square_bshd_for_sbhd": (
        "takes bshd for sbhd where there are as many sequences as positions",
        when(
            lambda call: call["layout"] == "bshd" and call["x"].shape[0] == call["x"].shape[1],
            lambda call: call.sound(layout="sbhd"),
        ))}),
    *table("rope_fwd", {"rope_takes_an_empty_sequences_offset": (
        "takes an empty sequence's offset for the next one's",
        when(given(cu_seqlens=..., offsets=...), lambda call: call.sound(offsets=_offsets_of_empty(call))))}),
    *table("quantize", {
        "cast_replaces_a_scale_of_out": ("puts another scale into `out`", _scale_replaced),
        "cast_writes_one_scale_of_out": ("writes one of two scales of `out`", _one_scale_written),
    }),
    *table("partial_amax", {"short_shard_lies_in_one_row_of_blocks": (
        "takes a shard shorter than a row to lie in one row of blocks", _short_in_one_row)}),
    *table("partial_amax", {"shard_begins_in_32_bits": ("keeps where a shard begins in 32 bits", _start_in_32_bits)}),
    *table("partial_cast", {"cast_shard_begins_in_32_bits": (
        "keeps where a shard begins in 32 bits", _start_in_32_bits)}),
    *table("gemm", {
        "product_reads_one_tile_of_scales": ("reads the first tile of scales for all", _one_tile),
        "product_takes_infinity_for_a_number": ("reads e5m2's Inf as its largest number", _infinity_as_largest),
    }, on="emulated_gemm"),
    *table("grouped_gemm", {
        "grouped_reads_one_tile_of_scales": ("reads the first tile of scales for all", _one_tile_each),
        "grouped_records_read_adjacent_splits": (
            "deals rows of records one further where splits have gaps", _one_row_further),
    }, on="emulated_grouped_gemm"),
    *table("grouped_gemm", {"grouped_reads_adjacent_splits": (
        "deals rows one further where splits have gaps", _one_row_further)},
        on="grouped_matmul_device_splits"),
)  # fmt: skip
