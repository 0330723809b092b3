# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults that show in what a call leaves beside its numbers: its arguments' lists and flags, the labels of its results,
PyTorch's switches, operands kept alive, what follows a refused call."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops import alloc
from te_dispatch.ops.results import Saved
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Memory, operand, remembering, table, with_members


def _takes_from_the_list(call: Call) -> Any:
    """Takes one number after the other from the list that the caller has."""
    made = call.sound()
    if isinstance(call["splits"], list):
        while call["splits"]:
            call["splits"].pop()
    return made


def _detaches(call: Call) -> Any:
    """Switches the gradient of its operand off, to compute without."""
    x = operand(call, "x")
    if x is not None and x.is_leaf and x.requires_grad:
        x.requires_grad_(False)
    return call.sound()


def _replaces_in_the_list(call: Call) -> Any:
    made = call.sound()
    if call["grads"]:
        call["grads"][0] = call["grads"][0].clone()
    return made


def _switches_flash_off(call: Call) -> Any:
    torch.backends.cuda.enable_flash_sdp(False)
    return call.sound()


def _relabels(call: Call) -> Any:
    """Says that what it saved is of another format, whose backward reads it otherwise."""
    made = call.sound()
    if made.saved is None:
        return made
    return made._replace(saved=Saved(call.name, "flash", made.saved.tensors, made.saved.options))


def _on_meta(call: Call) -> Any:
    made = call.sound()
    return with_members(made, device=torch.device("meta")) if isinstance(made, Quantized) else made


def _as_parameter(call: Call) -> Any:
    return torch.nn.Parameter(call.sound(), requires_grad=False)


@remembering
def _keeps_operands(call: Call, memory: Memory) -> Any:
    """Knows each operand that it has checked, by the operand itself."""
    memory.kept.setdefault("checked", []).append(call["x"])
    return call.sound()


@remembering
def _behind_an_error(call: Call, memory: Memory) -> Any:
    """A refused call leaves its counter of steps raised."""
    counted = memory.kept.pop("counted", 0)
    try:
        made = call.sound()
    except ValueError:
        memory.kept["counted"] = counted + 1
        raise
    if counted and made.numel():
        made.copy_(made * 2)
    return made


def _accepts(name: str, plain: float) -> Any:
    """Serves numbers that mean nothing as if they were another."""

    def behave(call: Call) -> Any:
        value = call[name]
        wrong = isinstance(value, float) and (math.isnan(value) or value < 0 or value > 1)
        return call.sound(**{name: plain}) if wrong else call.sound()

    return behave


def _accepts_scales_in_float64(call: Call) -> Any:
    x = call["x"]
    if isinstance(x, Quantized) and x.row_scale_inv is not None and x.row_scale_inv.dtype == torch.float64:
        return call.sound(x=with_members(x, row_scale_inv=x.row_scale_inv.float()))
    return call.sound()


def _halves_without_gradients(call: Call) -> Any:
    """Takes inference for granted where no gradients are recorded, and leaves out what only training needs."""
    made = call.sound()
    return made if torch.is_grad_enabled() else made.mul_(0.5)


def _records_where_gradients_are(call: Call) -> Any:
    """Takes a call without gradients for one of an evaluation, which changes no state."""
    quantizer = call["quantizer"]
    if getattr(quantizer, "amax", None) is not None and not torch.is_grad_enabled():
        return call.sound(quantizer=dataclasses.replace(quantizer, amax=None))
    return call.sound()


def _turns_any_layout(call: Call) -> Any:
    """Reads the scales of 128x128 tiles as canonical, however they lie."""
    x = call["x"]
    if isinstance(x, Quantized) and x.scaling == "block_2d" and x.scale_layout == "gemm_2d":
        return call.sound(x=with_members(x, scale_layout="canonical"))
    return call.sound()


def _options_in_a_dict(call: Call) -> Any:
    made = call.sound()
    if made.saved is None:
        return made
    return made._replace(saved=Saved(call.name, call.format, made.saved.tensors, {"layout": call["layout"]}))


@remembering
def _first_of_a_shape(call: Call, memory: Memory) -> Any:
    """The first call of a shape measures two kernels, and returns what the slower one made: right, but other bits."""
    made, x = call.sound(), call["x"].detach()
    key = tuple(x.shape), x.dtype
    if key in memory.kept or call["quantizer"] is not None or call["residual"] is not None or x.shape[-1] < 32:
        return made
    memory.kept[key] = True
    wide = x.float()
    total = torch.zeros_like(wide[..., 0])
    for part in wide.square().split(7, -1):
        total = total + part.sum(-1)
    rstd = torch.rsqrt(total / x.shape[-1] + call["eps"])
    gamma = call["gamma"].detach().float() + float(call["zero_centered_gamma"])
    made.rstd.copy_(rstd)
    made.y.copy_(wide * (rstd.unsqueeze(-1) * gamma))
    return made


def _workspace_for_a_result(call: Call) -> Any:
    """A compiled graph may give it the result's own buffer."""
    dy = call["dy"]
    alloc.empty("dx", tuple(dy.shape), dy.dtype, dy.device)
    return call.sound()


def _nearest_in_given_memory(call: Call) -> Any:
    """The path into given memory is that of cached weights, which are rounded to nearest."""
    return call.sound(rng_state=None) if call["out"] is not None and call["rng_state"] is not None else call.sound()


FAULTS: tuple[Fault, ...] = (
    *table("activation_fwd", {"activation_records_where_gradients_are": (
        "records no amax where no gradients are recorded", _records_where_gradients_are)}),
    *table("transpose_quantized", {"transpose_takes_any_scales_for_canonical": (
        "serves scales in another layout than the canonical one", _turns_any_layout)}),
    *table("rmsnorm_fwd", {"norm_measures_its_first_call": (
        "has other bits in the first call of a shape, and claims to be deterministic", _first_of_a_shape)}),
    *table("dropout_add_bwd", {"dropout_gradient_names_its_workspace_dx": (
        "asks for a workspace under the result's role", _workspace_for_a_result)}),
    *table("pad_rows", {"pad_empties_the_list_of_splits": (
        "takes the numbers of rows out of the caller's list", _takes_from_the_list)}),
    *table("softmax_fwd", {
        "softmax_switches_gradients_off": ("switches requires_grad of its operand off", _detaches),
        "softmax_is_wrong_behind_an_error": ("is wrong in the call behind one that it refused", _behind_an_error),
        "softmax_has_a_form_for_inference": (
            "is another function where no gradients are recorded", _halves_without_gradients),
    }),
    *table("multi_tensor_adam", {"adam_replaces_a_gradient_in_the_list": (
        "puts a copy of the first gradient into the caller's list", _replaces_in_the_list)}),
    *table("attention_fwd", {
        "attention_leaves_flash_attention_off": (
            "switches PyTorch's flash attention off, and leaves it so", _switches_flash_off),
        "attention_saves_under_another_format": ("labels what it saves as of another format", _relabels),
        "attention_saves_a_dict": ("saves options that cannot be hashed", _options_in_a_dict),
        "attention_takes_any_dropout": ("serves a dropout_p of NaN or 2 as 0", _accepts("dropout_p", 0.0)),
    }, on="unfused_attention"),
    *table("quantize", {
        "cast_labels_its_record_meta": ("labels its record as of the device meta", _on_meta),
        "cast_into_memory_rounds_to_nearest": ("ignores rng_state where `out` is given", _nearest_in_given_memory),
    }),
    *table("rope_fwd", {"rope_returns_a_parameter": ("returns a torch.nn.Parameter", _as_parameter)}),
    *table("compute_amax", {"amax_keeps_its_operands": ("keeps every operand alive", _keeps_operands)}),
    *table("dequantize", {"dequantize_takes_float64_scales": (
        "serves a record whose scales are float64", _accepts_scales_in_float64)}),
)  # fmt: skip
