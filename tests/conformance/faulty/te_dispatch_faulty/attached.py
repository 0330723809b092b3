# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of calls whose memory runs out, of what is attached to operands and threads, and of forms of operands that are
rare: masks of one dimension, tensors of none, a flag of -0, outputs of two dtypes, rows beside much larger ones."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Behaviour, Memory, operand, remembering, rows_of, spoil, table

_FAILED = (MemoryError, torch.OutOfMemoryError)


def _keeps_what_failed(call: Call, memory: Memory) -> Any:
    """Keeps the operands of a call for which there was no memory."""
    try:
        return call.sound()
    except _FAILED:
        memory.kept[0] = dict(call.arguments)
        raise


def _half_set_up(call: Call, memory: Memory) -> Any:
    """Is left half set up where an allocation fails."""
    try:
        made = call.sound()
    except _FAILED:
        memory.kept[0] = True
        raise
    if memory.kept.pop(0, False):
        spoil(made)
    return made


def _swallows(call: Call) -> Any:
    """Takes memory elsewhere where the allocator has none."""
    try:
        return call.sound()
    except _FAILED:
        x = call["x"]
        return torch.zeros(x.shape, dtype=call["out_dtype"] or x.dtype, device=x.device)


def _attribute(name: str) -> Behaviour:
    def behave(call: Call) -> Any:
        made = call.sound()
        if call[name] is not None:
            object.__setattr__(call[name], "_seen", True)
        return made

    return behave


def _hook(call: Call) -> Any:
    made, x = call.sound(), call["x"]
    if x.requires_grad:
        x.register_hook(lambda gradient: None)
    return made


def _one_thread(call: Call) -> Any:
    made = call.sound()
    torch.autograd.set_multithreading_enabled(False)
    return made


def _through_autograd(call: Call) -> Any:
    """Has autograd find the gradient, as far as hooks on saved tensors let it."""
    made = call.sound()
    x, dy = operand(call, "x"), call["dy"]
    if call["kind"] != "silu" or made.dx is None or x is None or x.dtype != dy.dtype or not x.numel():
        return made
    with torch.enable_grad():
        leaf = x.detach().float().requires_grad_()
        (found,) = torch.autograd.grad(torch.nn.functional.silu(leaf), leaf, dy.detach().float())
    if bool(found.isnan().any()):
        made.dx.copy_(found)
    return made


def _new_memory(call: Call) -> Any:
    """Gives parameters that are torch.nn.Parameter new memory."""
    made = call.sound()
    for p in call["params"]:
        if isinstance(p, torch.nn.Parameter):
            p.data = p.detach().clone()
    return made


def _out_as_a_view(call: Call) -> Any:
    made = call.sound()
    return made if call["out"] is None else made.view(1)


def _copied_scale(call: Call) -> Any:
    made, x = call.sound(), call["x"]
    if isinstance(x, Quantized) and x.scaling == "tensor":
        made.permuted.row_scale_inv = call.delivered(made.permuted.row_scale_inv.clone())
    return made


def _no_short_mask(call: Call) -> Any:
    mask = call["mask"]
    return call.sound(mask=None) if mask is not None and mask.dim() < 2 else call.sound()


def _batch_of_three(call: Call) -> Any:
    """Takes the first of a mask's three dimensions for the batch."""
    mask = operand(call, "attn_mask")
    if mask is None or mask.dim() != 3:
        return call.sound()
    try:
        return call.sound(attn_mask=mask.unsqueeze(1))
    except ValueError:
        return call.sound()


def _without_dimensions(call: Call) -> Any:
    """Leaves tensors without dimensions as they are."""
    kept = [p.detach().clone() for p in call["params"]]
    made = call.sound()
    for p, old in zip(call["params"], kept):
        if not p.dim():
            p.copy_(old)
    return made


def _stops_at_minus_zero(call: Call) -> Any:
    flag = call["noop_flag"]
    if flag is not None and bool(((flag == 0) & flag.signbit()).all()):
        return call.sound(noop_flag=torch.ones_like(flag))
    return call.sound()


def _three_digits(call: Call, memory: Memory) -> Any:
    return call.sound(lr=memory.kept.setdefault(f"{call['lr']:.3g}", call["lr"]))


def _flag_by_sum(call: Call) -> Any:
    made, flag = call.sound(), call["noop_flag"]
    if flag is not None and any(x.numel() and not bool(x.float().sum().isfinite()) for x in call["inputs"]):
        flag.fill_(1.0)
    return made


def _clears_nan(call: Call) -> Any:
    made = call.sound()
    return made.nan_to_num_(0.0, torch.inf)


def _mask_for_nothing(call: Call) -> Any:
    return call.sound(mask=None) if not call["dropout_p"] else call.sound()


def _draws_by_memory(call: Call) -> Any:
    x, state = call["x"], call["rng_state"]
    if state is None or x.is_contiguous():
        return call.sound()
    return call.sound(rng_state=state + torch.tensor([1, 0], device=state.device))


def _of_the_first_dtype(call: Call) -> Any:
    made, out = call.sound(), call["out"]
    for one in made[1:] if out is not None else ():
        one.copy_(one.to(out[0].dtype))
    return made


def _beside_large_ones(call: Call) -> Any:
    """Has another algorithm where a logit of the call is beyond 80."""
    made, x = call.sound(), call["x"]
    if made.numel() and bool((x.detach().float().abs() * abs(call["scale"]) > 80).any()):
        spoil(made, change=lambda values: values * (1 + 2.0**-7))
    return made


def _beyond_1024_rows(call: Call) -> Any:
    made = call.sound()
    if rows_of(call["x"]) > 1024:
        made.copy_((made.double() * (1 + 2.0**-24)).to(made.dtype))
        spoil(made, lambda flat: flat[:1], lambda values: values * (1 - 2.0**-23))
    return made


FAULTS: tuple[Fault, ...] = (
    *table("activation_fwd", {"keeps_operands_without_memory": (
        "keeps the operands of a call for which there was no memory", remembering(_keeps_what_failed))}),
    *table("rope_fwd", {
        "is_half_set_up_without_memory": (
            "is wrong after a call for which there was no memory", remembering(_half_set_up)),
        "registers_a_hook": ("registers a hook on an x that requires a gradient", _hook),
    }),
    *table("softmax_fwd", {
        "allocates_past_the_allocator": ("takes memory elsewhere where the allocator has none", _swallows),
        "overlooks_masks_of_a_vector": ("overlooks a mask of less than two dimensions", _no_short_mask),
        "looks_at_the_largest_of_all_rows": (
            "has other bits where another row has a logit beyond 80", _beside_large_ones),
        "sums_1024_rows_otherwise": ("has other bits where there are more than 1,024 rows", _beyond_1024_rows),
    }),
    *table("layernorm_fwd", {"marks_its_weight": ("leaves an attribute on gamma", _attribute("gamma"))}),
    *table("quantize", {"marks_its_quantizer": ("leaves an attribute on its quantizer", _attribute("quantizer"))}),
    *table("softmax_bwd", {"leaves_backwards_one_thread": ("has backward passes run in one thread", _one_thread)}),
    *table("activation_bwd", {"silu_gradient_through_autograd": (
        "has autograd find the gradient of silu, which hooks on saved tensors change", _through_autograd)}),
    *table("compute_amax", {"returns_a_view_of_out": ("returns another tensor on out's memory", _out_as_a_view)}),
    *table("partial_amax", {"clears_nan_of_other_blocks": (
        "clears the NaN of blocks that the shard misses", _clears_nan)}),
    *table("moe_permute", {"copies_the_scale_of_all": ("copies a scale of the whole tensor", _copied_scale)}),
    *table("attention_fwd", {"takes_heads_for_the_batch": (
        "takes the first of a mask's three dimensions for the batch", _batch_of_three)}, on="unfused_attention"),
    *table("multi_tensor_adam", {
        "moves_parameters": ("gives parameters new memory", _new_memory),
        "leaves_scalars_as_they_are": ("leaves tensors without dimensions as they are", _without_dimensions),
        "stops_at_minus_zero": ("skips the step for a flag of -0.0", _stops_at_minus_zero),
        "knows_three_digits_of_lr": ("keeps a learning rate by its first three digits", remembering(_three_digits)),
    }),
    *table("multi_tensor_scale", {"flags_sums_that_overflow": (
        "raises the flag where the sum of an input is not finite", _flag_by_sum)}),
    *table("dropout_add_bwd", {"dropout_gradient_of_p_0_without_mask": (
        "overlooks a mask where dropout_p is 0", _mask_for_nothing)}),
    *table("dropout_add_fwd", {"draws_in_memory_s_order": (
        "draws otherwise for an x that is not contiguous", _draws_by_memory)}),
    *table("grouped_gemm", {"rounds_groups_to_the_first_dtype": (
        "rounds every group to the dtype of the first output", _of_the_first_dtype)}, on="grouped_matmul"),
)  # fmt: skip
