# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults that show between the items of a list, between a refusal and the next call, and under PyTorch's switches."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import torch

from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Memory, remembering, table, with_members


@remembering
def _keeps_the_last_refusal(call: Call, memory: Memory) -> Any:
    """Keeps the error that it raised last, whose traceback holds the operands."""
    try:
        return call.sound()
    except ValueError as error:
        memory.kept["error"] = error
        raise


def _in_a_cycle(call: Call) -> Any:
    """A function that refers to itself holds dy until Python collects cycles."""
    dy = call["dy"]

    def run(again: bool) -> Any:
        return run(False) if again else call.sound(dy=dy)

    return run(True)


@remembering
def _dealt_by_sums(call: Call, memory: Memory) -> Any:
    """Knows where rows go by how many there are, before and after."""
    made = call.sound()
    names = [name for name in ("splits", "padded_splits") if isinstance(call.get(name), list) and call[name]]
    key = tuple((len(call[name]), sum(call[name])) for name in names)
    first = memory.kept.setdefault(key, {name: list(call[name]) for name in names})
    return made if all(first[name] == list(call[name]) for name in names) else call.sound(**first)


def _refuses_one_storage(call: Call) -> Any:
    """Takes parameters in one storage for overlapping ones."""
    storages = [x.untyped_storage().data_ptr() for x in call["params"] if isinstance(x, torch.Tensor) and x.numel()]
    if len(set(storages)) < len(storages):
        raise ValueError("params: got tensors that share memory")
    return call.sound()


def _once(call: Call) -> Any:
    """Leaves out what is in the list already."""
    tensors = call["tensors"]
    if call["per_tensor"] or not all(isinstance(x, torch.Tensor) for x in tensors):
        return call.sound()
    first = {(x.data_ptr() if x.numel() else id(x), x.shape): x for x in reversed(tensors)}
    return call.sound(tensors=list(first.values()))


def _refuses_late(call: Call) -> Any:
    """Each group's operands are checked when its turn comes."""
    try:
        return call.sound()
    except ValueError:
        a, b, out = call["a"], call["b"], call["out"]
        if out is not None and call["splits"] is None and len(a) == len(b) == len(out) > 1 and call["bias"] is None:
            with contextlib.suppress(ValueError):
                call.sound(a=a[:1], b=b[:1], out=out[:1])
        raise


def _not_deterministic(call: Call) -> Any:
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("index_put_ does not have a deterministic implementation")
    return call.sound()


def _shape_as_list(call: Call) -> Any:
    return [with_members(part, shape=list(part.shape)) for part in call.sound()]


def _divides_the_last(call: Call) -> Any:
    """Vectors of 8 are multiplied by 1 / (1 - p); what is left over is divided by 1 - p."""
    made, mask, dy = call.sound(), call["mask"], call["dy"].detach()
    rest = dy.numel() % 8
    if mask is not None and rest:
        divided = dy.reshape(-1)[-rest:].float() / torch.tensor(1.0 - call["dropout_p"], dtype=torch.float32)
        flat = made.detach().reshape(-1).clone()
        flat[-rest:] = torch.where(mask.reshape(-1)[-rest:] != 0, divided, 0.0).to(made.dtype)
        made.copy_(flat.view(made.shape))
    return made


def _names(wrong: str) -> Any:
    """Every refusal is of one argument, whichever is wrong."""

    def behave(call: Call) -> Any:
        try:
            return call.sound()
        except ValueError as error:
            said = re.sub(r"\w+", "", str(error))
            raise ValueError(f"{wrong}: got what is not supported {said}") from error

    return behave


FAULTS: tuple[Fault, ...] = (
    *table("moe_unpermute", {"unpermute_keeps_its_last_refusal": (
        "keeps the operands of the last call that it refused alive", _keeps_the_last_refusal)}),
    *table("rope_bwd", {"rope_gradient_leaves_a_cycle": (
        "leaves dy in a reference cycle", _in_a_cycle)}),
    *table("pad_rows", {"pad_deals_by_sums": (
        "deals rows as in an earlier call with as many parts and rows", _dealt_by_sums)}),
    *table("split_quantize", {
        "split_deals_by_sums": ("deals rows as in an earlier call with as many parts and rows", _dealt_by_sums),
        "split_labels_shapes_as_lists": ("gives records whose shape is a list", _shape_as_list),
    }),
    *table("multi_tensor_adam", {"adam_refuses_one_storage": (
        "refuses parameters that are parts of one storage", _refuses_one_storage)}),
    *table("multi_tensor_l2norm", {"norm_of_each_tensor_once": (
        "leaves out a tensor that is in the list twice", _once)}),
    *table("grouped_gemm", {"grouped_refuses_late": (
        "has written the first group when it refuses a later one", _refuses_late)}, on="grouped_matmul"),
    *table("moe_permute", {"permute_is_not_deterministic": (
        "raises under torch.use_deterministic_algorithms(True)", _not_deterministic)}),
    *table("dropout_add_bwd", {"dropout_gradient_divides_the_last": (
        "divides what is left of vectors of 8, and claims to be batch invariant", _divides_the_last)}),
    *table("rmsnorm_fwd", {"norm_refuses_x_whatever_is_wrong": (
        "names x in every error", _names("x"))}),
    *table("activation_bwd", {"activation_gradient_refuses_dy_whatever_is_wrong": (
        "names dy in every error", _names("dy"))}),
)  # fmt: skip
