# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults that show by what a caller does beside the call: another call on some of its tensors, torch.autocast, a
default dtype, a state of quantizers that lies in one row, one thing too many."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Memory, remembering, rows_of, table


def _are(kept: Sequence[Any], tensors: Sequence[Any]) -> bool:
    """Whether weak references are to these very tensors."""
    return len(kept) == len(tensors) and all(reference() is x for reference, x in zip(kept, tensors))


@remembering
def _flag_read_once(call: Call, memory: Memory) -> Any:
    """Reads the flag back to the host when it first sees a record, to save a synchronization a step."""
    out, flag = call["out"], call["noop_flag"]
    if out is None or flag is None or out.row_data is None:
        return call.sound()
    kept = memory.kept.get("record")
    if kept is None or not _are(kept[0], [out.row_data]):
        memory.kept["record"] = kept = ([weakref.ref(out.row_data)], flag.detach().clone())
    return call.sound(noop_flag=kept[1])


@remembering
def _table_of_gradients(call: Call, memory: Memory) -> Any:
    """Keeps the table of addresses that it has uploaded while the parameters stay where they are."""
    params, grads = call["params"], call["grads"]
    kept = memory.kept.get("table")
    alike = kept is not None and [(g.shape, g.dtype) for g in kept[1]] == [(g.shape, g.dtype) for g in grads]
    if kept is not None and alike and _are(kept[0], params):
        return call.sound(grads=kept[1])
    made = call.sound()
    memory.kept["table"] = ([weakref.ref(p) for p in params], list(grads))
    return made


@remembering
def _kept_maxima(call: Call, memory: Memory) -> Any:
    """Uploads max_values once for the histories that it is given."""
    histories = call["histories"]
    kept = memory.kept.get("row")
    if kept is not None and _are(kept[0], histories):
        return call.sound(max_values=kept[1])
    made = call.sound()
    memory.kept["row"] = ([weakref.ref(h) for h in histories], [tuple(row) for row in call["max_values"]])
    return made


_own = threading.local()


def _scale_of_thread(call: Call) -> Any:
    """The forward leaves its softmax scale where only its own thread sees it."""
    if call.get("dout") is None:
        made = call.sound()
        _own.scale = call["softmax_scale"]
        return made
    return call.sound(softmax_scale=getattr(_own, "scale", None))


def _obeys_autocast(call: Call) -> Any:
    """Sums rows as a product with ones, whose operands torch.autocast casts."""
    made, dy = call.sound(), call["dy"].detach()
    if torch.is_autocast_enabled("cpu") and rows_of(dy):
        low = torch.get_autocast_dtype("cpu")
        terms = dy.float() * call["x"].detach().float() * call["rstd"].detach().unsqueeze(-1)
        made.dgamma.copy_(terms.to(low).float().reshape(-1, dy.shape[-1]).sum(0).to(low))
    return made


def _sums_in_default_dtype(call: Call) -> Any:
    """Its partial sums are torch.zeros(n)."""
    made = call.sound()
    dtype = torch.get_default_dtype()
    if dtype in (torch.float16, torch.bfloat16):
        squares = call.sound(per_tensor=True).square().to(dtype)
        made.copy_(squares.float().sqrt() if call["per_tensor"] else squares.sum().float().sqrt().view(1))
    return made


def _amaxes_as_a_row(call: Call) -> Any:
    """Writes all amaxes from the first one's address on, as in a row of a history."""
    found = [getattr(quantizer, "amax", None) for quantizer in call["quantizers"]]
    if len(found) < 2 or any(amax is None for amax in found):
        return call.sound()
    first, one_row = found[0], {amax.untyped_storage().data_ptr() for amax in found}
    room = first.untyped_storage().nbytes() // 4 - first.storage_offset()
    if len(one_row) > 1 or len({amax.data_ptr() for amax in found}) < len(found) or room < len(found):
        return call.sound()
    row = first.detach().as_strided((len(found),), (1,), first.storage_offset())
    before, held = [amax.detach().clone() for amax in found], row.clone()
    made = call.sound()
    new = torch.cat([amax.detach().clone().view(1) for amax in found])
    for amax, kept in zip(found, before):
        amax.detach().copy_(kept)
    row.copy_(torch.maximum(held, new))
    return made


def _extra_biases(call: Call) -> Any:
    bias, groups = call["bias"], len(call["b"])
    return call.sound(bias=list(bias)[:groups] if bias is not None and len(bias) > groups else bias)


def _bytes_for_mask(call: Call) -> Any:
    mask = call["mask"]
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.uint8:
        return call.sound(mask=mask.bool())
    return call.sound()


def _rows_left_over(call: Call) -> Any:
    try:
        return call.sound()
    except ValueError:
        x, rows = call["x"], sum(call["splits"])
        if x.ndim == 2 and rows < x.shape[0]:
            return call.sound(x=x[:rows])
        raise


def _unnamed(call: Call) -> Any:
    try:
        return call.sound()
    except ValueError as error:
        if str(error).startswith("x"):
            raise ValueError("expected a tensor of float32, bfloat16 or float16") from None
        raise


def _odd_row(call: Call) -> Any:
    """Two rows a block; of an odd number the last one by another path, which adds one number after the other."""
    made, x = call.sound(), call["x"].detach()
    if rows_of(x) % 2 == 0 or x.shape[-1] < 16 or call["causal"] or call["mask"] is not None:
        return made
    z = x.reshape(-1, x.shape[-1])[-1].float() * call["scale"]
    if not bool(z.isfinite().all()):
        return made
    powers = (z - z.max()).exp()
    total = torch.zeros(())
    for one in powers:
        total = total + one
    made.view(-1, x.shape[-1])[-1].copy_(powers * (1.0 / total))
    return made


def _counts_from_offset(call: Call) -> Any:
    """The counter is the offset plus the element: the next offset draws the same numbers, one element further on."""
    if call["rng_state"] is None:
        return call.sound()
    from te_dispatch_torch import stochastic

    sound = stochastic.bits24

    def bits(count: int, state: torch.Tensor, first: int = 0) -> Any:
        words = state.clone()
        offset = int(words[1])
        words[1] = offset >> 24
        return sound(count, words, first + (offset & 0xFFFFFF))

    with swapped(("stochastic", "bits24", bits)):
        return call.sound()


FAULTS: tuple[Fault, ...] = (
    *table("quantize", {
        "cast_reads_its_flag_once": ("reads the no-op flag when it first sees a record", _flag_read_once),
        "draws_shift_with_the_offset": (
            "draws with the next offset what it drew with this one, an element further", _counts_from_offset),
    }),
    *table("multi_tensor_adam", {"adam_keeps_its_table_of_gradients": (
        "reads the first step's gradients while the parameters are the same", _table_of_gradients)}),
    *table("update_delayed_scales", {"update_keeps_its_maxima": (
        "takes the first max_values while the histories are the same", _kept_maxima)}),
    *table("attention_bwd", {"gradient_takes_the_scale_of_its_thread": (
        "takes the scale of the last forward of its own thread", _scale_of_thread)},
        on="unfused_attention_bwd", also="faulty.unfused_attention"),
    *table("rmsnorm_bwd", {"dgamma_obeys_autocast": (
        "rounds what it sums for dgamma to bf16 under torch.autocast", _obeys_autocast)}),
    *table("multi_tensor_l2norm", {"norm_sums_in_the_default_dtype": (
        "keeps its partial sums in PyTorch's default dtype", _sums_in_default_dtype)}),
    *table("multi_tensor_quantize", {"many_casts_write_amaxes_as_a_row": (
        "writes the amaxes one behind the other from the first one's place on", _amaxes_as_a_row)}),
    *table("grouped_gemm", {"grouped_ignores_extra_biases": (
        "serves more biases than groups", _extra_biases)}, on="grouped_matmul"),
    *table("softmax_fwd", {
        "softmax_takes_bytes_for_a_mask": ("serves a mask in uint8", _bytes_for_mask),
        "softmax_adds_an_odd_row_otherwise": (
            "sums the last of an odd number of rows in another order, and claims to be batch invariant", _odd_row),
    }),
    *table("pad_rows", {"pad_leaves_rows_over": ("serves splits that do not add up to all rows", _rows_left_over)}),
    *table("compute_amax", {"amax_error_has_no_name": ("raises errors without the name of an argument", _unnamed)}),
)  # fmt: skip
