# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Implementations that differ from the torch backend in what the contracts leave open: the kit must find nothing.

They are switched on like faults, in the backend ``varied``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from te_dispatch.core.autograd import below_autograd
from te_dispatch.ops import alloc
from te_dispatch.ops.results import ActivationForward, NormBackward
from te_dispatch_faulty.arithmetic import (
    in_blocks,
    in_fp64,
    in_row_tiles,
    layernorm_by_halves,
    layernorm_by_welford,
    layernorm_in_fp64,
    norm,
    product,
    rms_backwards,
    rms_flushing,
    rms_in_fp64,
    split_k,
    turned,
)
from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.formulas import (
    activation_by_sigmoids,
    adam_with_folded_corrections,
    contiguous_operands,
    flash_backward,
    flash_forward,
    in_a_thread,
    keeps_constants,
    norm_by_power,
    norm_gradient_in_fp64,
    rope_by_complex_numbers,
    softmax_gradient_distributed,
    unpermute_in_fp64,
)
from te_dispatch_faulty.spoiling import Behaviour, operand, spoiled, truncated
from te_dispatch_torch.activation import _backward, _forward
from te_dispatch_torch.dropout import keep_mask
from te_dispatch_torch.quantize import dequantize


def _by_rows(operand_name: str, others: Sequence[str] = ()) -> Behaviour:
    """7 rows at a time, each piece a call of its own."""

    def behave(call: Call) -> Any:
        x = operand(call, operand_name)
        if x is None or x.ndim < 2 or not x.numel() or call.get("quantizer") is not None:
            return call.sound()
        names = (operand_name, *others)
        pieces = [dict(zip(names, parts)) for parts in zip(*(_split(call, name) for name in names))]
        made = [call.sound(**piece) for piece in pieces]
        if isinstance(made[0], torch.Tensor):
            return call.delivered(torch.cat(made))
        joined = [None if member is None else torch.cat([m[i] for m in made]) for i, member in enumerate(made[0])]
        return call.delivered(type(made[0])(*joined))

    return behave


def _split(call: Call, name: str) -> list[Any]:
    given = operand(call, name)
    count = -(-len(call[next(iter(call.arguments))]) // 7)
    return [None] * count if given is None else list(given.split(7))


def _dgamma_in_parts(call: Call) -> Any:
    """Column sums as one partial sum for every fourth row, added at the end."""
    made, x = call.sound(), call["x"]
    if not x.numel():
        return made
    normal = x.float()
    if call.get("mean") is not None:
        normal = normal - call["mean"].unsqueeze(-1)
    terms = (call["dy"].float() * normal * call["rstd"].unsqueeze(-1)).reshape(-1, x.shape[-1])
    sums = torch.stack([terms[start::4].sum(0) for start in range(4)]).sum(0)
    return call.delivered(NormBackward(made.dx, sums.to(made.dgamma.dtype), made.dbeta))


def _normalized_by_difference(call: Call) -> Any:
    """x rstd - mean rstd for the normalized rows."""
    made, x = call.sound(), call["x"].float()
    if not x.numel():
        return made
    mean, rstd = (call[name].unsqueeze(-1) for name in ("mean", "rstd"))
    normal, dy = x * rstd - mean * rstd, call["dy"].float()
    weighed = dy * (call["gamma"].float() + (1.0 if call["zero_centered_gamma"] else 0.0))
    along = (weighed * normal).mean(-1, keepdim=True)
    dx = rstd * (weighed - weighed.mean(-1, keepdim=True) - normal * along)
    dx = dx if call["add"] is None else dx + call["add"].float()
    dgamma = (dy * normal).reshape(-1, x.shape[-1]).sum(0)
    return call.delivered(NormBackward(dx.to(made.dx.dtype), dgamma.to(made.dgamma.dtype), made.dbeta))


def _softmax_tiles(call: Call) -> Any:
    """Online: 64 columns at a time, with a running maximum and sum."""
    made, x = call.sound(), call["x"]
    if call["mask"] is not None or call["causal"] or not x.numel() or not x.isfinite().all():
        return made
    z = x.float() * call["scale"]
    top = torch.full_like(z[..., :1], -torch.inf)
    total = torch.zeros_like(top)
    for tile in z.split(64, -1):
        higher = torch.maximum(top, tile.amax(-1, keepdim=True))
        total = total * (top - higher).exp() + (tile - higher).exp().sum(-1, keepdim=True)
        top = higher
    return made.copy_((z - top).exp() / total)


def _softmax_in_fp64(call: Call) -> Any:
    made, x = call.sound(), call["x"]
    if call["mask"] is not None or call["causal"] or not x.isfinite().all():
        return made
    return made.copy_(torch.softmax(x.double() * call["scale"], -1))


def _softmax_base_2(call: Call) -> Any:
    made, x = call.sound(), call["x"]
    if call["mask"] is not None or call["causal"] or not x.numel() or not x.isfinite().all():
        return made
    z = x.float() * call["scale"]
    powers = torch.exp2((z - z.amax(-1, keepdim=True)) * 1.4426950408889634)
    return made.copy_(powers * powers.sum(-1, keepdim=True).reciprocal())


def _softmax_gradient_in_fp64(call: Call) -> Any:
    made, y, dy = call.sound(), call["y"].double(), call["dy"].double()
    return made.copy_(call["scale"] * y * (dy - (dy * y).sum(-1, keepdim=True)))


def _activation_in_fp64(call: Call) -> Any:
    x = operand(call, "x")
    made = call.sound()
    if x is None or call["quantizer"] is not None:
        return made
    return call.delivered(
        ActivationForward(_forward(call["kind"], x.double(), call["params"]).to(made.out.dtype), None)
    )


def _activation_gradient_in_fp64(call: Call) -> Any:
    x, made = operand(call, "x"), call.sound()
    if x is None or made.dx is None or call["quantizer"] is not None or call["with_dbias"]:
        return made
    made.dx.copy_(_backward(call["kind"], call["dy"].double(), x.double(), call["params"]))
    return made


def _from_workspace(name: str) -> Behaviour:
    """Copies an operand into a workspace from the allocator, padded to whole vectors, and reads that."""

    def behave(call: Call) -> Any:
        x = operand(call, name)
        if x is None or not x.numel():
            return call.sound()
        room = alloc.empty("workspace", (-(-x.numel() // 16) * 16,), x.dtype, x.device)
        with torch.no_grad():
            copy = room[: x.numel()].view(x.shape).copy_(x)
        return call.sound(**{name: copy})

    return behave


class _OfThread(threading.local):
    """Workspaces that a thread keeps."""

    def __init__(self) -> None:
        self.rooms: dict[Any, torch.Tensor] = {}


_kept = _OfThread()


def _from_kept_workspace(name: str) -> Behaviour:
    """Reads an operand out of a workspace that each thread keeps for the size."""

    def behave(call: Call) -> Any:
        x = operand(call, name)
        if x is None or not x.numel():
            return call.sound()
        with torch.no_grad():
            room = _kept.rooms.setdefault(
                (name, tuple(x.shape), x.dtype), torch.empty(x.shape, dtype=x.dtype, device=x.device)
            )
            return call.sound(**{name: room.copy_(x)})

    return behave


def _one_arena(call: Call) -> Any:
    """All results are pieces of one allocation, side by side."""
    made = call.sound()
    members = [member for member in made if isinstance(member, torch.Tensor)]
    if len(members) != sum(member is not None for member in made) or not made[0].numel():
        return made
    places, size = [], 0
    for member in members:
        places.append(size)
        size += -(-member.numel() * member.element_size() // 64) * 64
    arena = alloc.empty("out", (size,), torch.uint8, members[0].device)
    pieces = []
    for place, member in zip(places, members):
        raw = arena[place : place + member.numel() * member.element_size()]
        pieces.append(raw.view(member.dtype).view(member.shape).copy_(member))
    left = iter(pieces)
    return type(made)(*(None if member is None else next(left) for member in made))


def _other_draws(call: Call) -> Any:
    """A generator of its own: any that depends on seed, offset and element alone will do."""
    if not call["dropout_p"] or call["rng_state"] is None:
        return call.sound()

    def draw(shape: tuple[int, ...], p: float, state: torch.Tensor) -> torch.Tensor:
        mixed = torch.tensor([0x5DEECE66D, 0x2545F491], dtype=torch.int64, device=state.device)
        return keep_mask(shape, p, state ^ mixed)

    with swapped(("dropout", "keep_mask", draw)):
        return call.sound()


def _norm_in_fp64(call: Call) -> Any:
    made = call.sound()
    norms = torch.stack([t.double().square().sum() for t in call["tensors"]])
    return made.copy_((norms if call["per_tensor"] else norms.sum().view(1)).sqrt())


def _adam_one_by_one(call: Call) -> Any:
    """A call for each tensor, in reverse."""
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "master")
    if not call["params"] or len({len(call[name]) for name in names if call[name] is not None}) > 1:
        return call.sound()
    for i in reversed(range(len(call["params"]))):
        call.sound(**{name: None if call[name] is None else [call[name][i]] for name in names})
    return None


def _choices_reversed(call: Call) -> Any:
    """Adds a token's choices from the last one on."""
    probs = call["probs"]
    return call.sound(row_map=call["row_map"].flip(1), probs=None if probs is None else probs.flip(1))


def _dequantize_in_fp64(call: Call) -> Any:
    """Codes times scales in fp64 is the same number: it has fewer bits than fp32's product rounds to."""
    if call["dtype"] != torch.float32:
        return call.sound()
    return call.delivered(dequantize(call["x"], dtype=torch.float32).double().float())


def _amax_of_both_ends(call: Call) -> Any:
    x = call["x"]
    if call.get("out") is not None or not x.numel() or x.isnan().any():
        return call.sound()
    return call.sound().copy_(torch.maximum(x.max(), -x.min()).float().view(-1))


def _heads_apart(call: Call) -> Any:
    """One call for each half of the batch, put together."""
    q, k, v = (operand(call, name) for name in ("q", "k", "v"))
    simple = call["layout"] == "bshd" and call["mask"] in ("none", "causal") and call["packing"] is None
    plain = call["bias_type"] == "none" and call["page_table"] is None and not call["dropout_p"]
    whole = call["attn_mask"] is None and call["cu_seqlens_q"] is None and not call["with_max_logit"]
    if q is None or k is None or v is None or not (simple and plain and whole) or q.shape[0] < 2:
        return call.sound()
    if call["out_quantizer"] is not None or call["s_quantizer"] is not None:
        return call.sound()
    made = call.sound()
    for part in (slice(0, 1), slice(1, None)):
        half = call.sound(q=q[part], k=k[part], v=v[part])
        made.out[part].copy_(half.out)
        if made.lse is not None:
            made.lse[part].copy_(half.lse)
    return made


def _variations(operator: str, on: str = "", also: str = "", /, **entries: tuple[str, Behaviour]) -> tuple[Fault, ...]:
    """Decorated, as what calls PyTorch's products and sums has to be."""
    return tuple(
        Fault(name, operator, f"varied.{on or operator}", wrong, below_autograd(behave), also=also and f"varied.{also}")
        for name, (wrong, behave) in entries.items()
    )


VARIATIONS = (
    *_variations(
        "gemm", "matmul",
        splits_k_in_4=("adds four partial products", product(split_k)),
        multiplies_in_fp64=("computes in fp64", product(in_fp64)),
        multiplies_transposed=("computes the transposed product", product(turned)),
        sums_backwards=("adds products from the end, in blocks of 32", product(in_blocks)),
        multiplies_row_tiles=("pads rows to tiles of 16", product(in_row_tiles)),
        copies_into_workspace=("reads b out of a padded workspace", _from_workspace("b")),
    ),
    *_variations(
        "layernorm_fwd",
        normalizes_in_fp64=("computes in fp64", lambda call: norm(call, layernorm_in_fp64)),
        sums_pieces_of_64=("sums in pieces of 64 columns", lambda call: norm(call, layernorm_by_halves)),
        updates_by_welford=("updates mean and variance", lambda call: norm(call, layernorm_by_welford)),
        returns_one_arena=("returns pieces of one allocation", _one_arena),
        normalizes_7_rows=("serves 7 rows at a time", _by_rows("x", ("residual",))),
    ),
    *_variations(
        "rmsnorm_fwd",
        rms_in_fp64=("computes in fp64", lambda call: norm(call, rms_in_fp64)),
        rms_from_the_end=("adds squares one by one from the end", lambda call: norm(call, rms_backwards)),
        rms_flushes_subnormals=("flushes subnormals to zero", lambda call: norm(call, rms_flushing)),
        rms_from_kept_workspace=("reads x out of a workspace of the thread", _from_kept_workspace("x")),
    ),
    *_variations(
        "layernorm_bwd",
        sums_dgamma_in_parts=("adds four partial sums of rows", _dgamma_in_parts),
        normalizes_by_difference=("takes x rstd - mean rstd for the normalized rows", _normalized_by_difference),
    ),
    *_variations("rmsnorm_bwd", sums_rms_dgamma_in_parts=("adds four partial sums of rows", _dgamma_in_parts)),
    *_variations(
        "softmax_fwd",
        softmax_online=("keeps a running maximum over tiles of 64", _softmax_tiles),
        softmax_in_fp64=("computes in fp64", _softmax_in_fp64),
        softmax_to_base_2=("exponentiates to base 2, multiplies by the reciprocal", _softmax_base_2),
    ),
    *_variations("softmax_bwd", softmax_gradient_in_fp64=("computes in fp64", _softmax_gradient_in_fp64)),
    *_variations("activation_fwd", activation_in_fp64=("computes in fp64", _activation_in_fp64)),
    *_variations("activation_bwd", activation_gradient_in_fp64=("computes in fp64", _activation_gradient_in_fp64)),
    *_variations("rope_fwd", rope_from_workspace=("reads x out of a padded workspace", _from_workspace("x"))),
    *_variations("dropout_add_fwd", draws_otherwise=("has a generator of its own", _other_draws)),
    *_variations("dropout_add_bwd", drops_7_rows=("serves 7 rows at a time", _by_rows("dy", ("mask",)))),
    *_variations("multi_tensor_l2norm", l2norm_in_fp64=("computes in fp64", _norm_in_fp64)),
    *_variations("multi_tensor_adam", adam_one_by_one=("makes a call for each tensor", _adam_one_by_one)),
    *_variations("moe_unpermute", adds_last_choice_first=("adds choices in reverse", _choices_reversed)),
    *_variations("dequantize", dequantize_in_fp64=("multiplies in fp64", _dequantize_in_fp64)),
    *_variations("compute_amax", amax_of_both_ends=("takes the larger of max and -min", _amax_of_both_ends)),
    *_variations("quantize", quantize_from_workspace=("reads x out of a padded workspace", _from_workspace("x"))),
    *_variations(
        "attention_fwd", "unfused_attention",
        attention_by_batches=("serves half the batch at a time", _heads_apart),
        attention_from_workspace=("reads k out of a padded workspace", _from_workspace("k")),
    ),
    *_variations(
        "attention_fwd", "unfused_attention", "unfused_attention_bwd",
        attention_draws_otherwise=("has a generator of its own", _other_draws),
    ),
    *_variations(
        "attention_fwd", "unfused_attention",
        flash_attention=("works by tiles of keys", flash_forward),
        # A unit in the last place more, of the two that the contract leaves.
        attention_cut_off=("cuts bits off instead of rounding", spoiled("out", change=truncated)),
    ),
    *_variations(
        "attention_bwd", "unfused_attention_bwd",
        flash_gradient=("works by tiles of keys", flash_backward),
        gradient_of_narrow_weights=("rounds p before all products", functools.partial(flash_backward, narrow=True)),
    ),
    *_variations("activation_fwd", activation_by_sigmoids=("computes gelu by a sigmoid", activation_by_sigmoids)),
    *_variations(
        "softmax_bwd", softmax_gradient_distributed=("multiplies before it subtracts", softmax_gradient_distributed)
    ),
    *_variations("layernorm_bwd", layernorm_gradient_in_fp64=("computes in fp64", norm_gradient_in_fp64)),
    *_variations("rmsnorm_bwd", rms_gradient_in_fp64=("computes in fp64", norm_gradient_in_fp64)),
    *_variations("rope_fwd", rope_by_complex_numbers=("multiplies complex numbers", rope_by_complex_numbers)),
    *_variations(
        "multi_tensor_adam",
        adam_with_folded_corrections=("folds bias corrections into the step", adam_with_folded_corrections),
    ),
    *_variations("multi_tensor_l2norm", norm_by_64_sums=("keeps 64 sums in fp64", norm_by_power)),
    *_variations("moe_unpermute", unpermute_in_fp64=("computes in fp64", unpermute_in_fp64)),
    *_variations(
        "gemm", "matmul",
        product_of_contiguous_operands=("copies operands first", contiguous_operands),
        product_keeps_constants=("keeps a constant", keeps_constants("b")),
        product_in_a_thread=("computes in a thread of its own", in_a_thread),
    ),
    *_variations("layernorm_fwd", norm_keeps_constants=("keeps a constant", keeps_constants("x"))),
    *_variations("dropout_add_fwd", dropout_of_contiguous_operands=("copies operands first", contiguous_operands)),
    *_variations("quantize", quantize_in_a_thread=("computes in a thread of its own", in_a_thread)),
)  # fmt: skip
