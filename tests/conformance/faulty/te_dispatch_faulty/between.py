# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults that show between the items of a list, between a refusal and the next call, and under PyTorch's switches."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import torch

from te_dispatch.core.errors import Declined
from te_dispatch.ops import alloc
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
        kept = torch.tensor(1.0 - call["dropout_p"], dtype=torch.float32, device=dy.device)
        divided = dy.reshape(-1)[-rest:].float() / kept
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


def _without_warn_only(call: Call) -> Any:
    """Asks for deterministic operators for its own time, and puts back only whether they were asked for."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return call.sound()
    finally:
        torch.use_deterministic_algorithms(before)


def _back_to_highest(call: Call) -> Any:
    """Multiplies in full fp32, and leaves PyTorch's default behind."""
    made = call.sound()
    torch.set_float32_matmul_precision("highest")
    return made


_DECLINED = Declined("x is not contiguous")


def _declines_with_one_error(call: Call) -> Any:
    """One exception for all calls; the last one's frames hang on it."""
    if isinstance(call["x"], torch.Tensor) and not call["x"].is_contiguous():
        raise _DECLINED
    return call.sound()


@remembering
def _otherwise_when_busy(call: Call, memory: Memory) -> Any:
    """Sums in another order while another thread is inside."""
    memory.kept["inside"] = memory.kept.get("inside", 0) + 1
    try:
        made = call.sound()
        if memory.kept["inside"] > 1 and made.dgamma.numel():
            x, dy = call["x"].detach().float(), call["dy"].detach().float()
            normed = (x - call["mean"].unsqueeze(-1)) * call["rstd"].unsqueeze(-1)
            product = (dy * normed).reshape(-1, x.shape[-1])
            made.dgamma.copy_(sum(part.sum(0) for part in product.split(5)))
        return made
    finally:
        memory.kept["inside"] -= 1


def _by_place_of_the_row(call: Call) -> Any:
    """Sums what lies before a row's first whole vector by itself."""
    made, y, dy = call.sound(), call["y"].detach(), call["dy"].detach()
    k = y.shape[-1] if y.dim() else 0
    if not y.numel() or k < 8 or k % 4 == 0:
        return made
    product, rows = (dy.float() * y.float()).reshape(-1, k), y.float().reshape(-1, k)
    flat = made.detach().reshape(-1, k).clone()
    for row in range(1, min(len(rows), 64)):
        head = -row * k % 4
        total = product[row, :head].sum() + product[row, head:].sum()
        flat[row] = ((product[row] - rows[row] * total) * call["scale"]).to(made.dtype)
    made.copy_(flat.view(made.shape))
    return made


def _divides_where_all_are_kept(call: Call) -> Any:
    mask, made = call["mask"], call.sound()
    if mask is None or not call["dropout_p"] or not made.numel() or not bool(mask.all()):
        return made
    kept = torch.tensor(1.0 - call["dropout_p"], dtype=torch.float32, device=made.device)
    return made.copy_(call["dy"].detach().float() / kept)


def _keeps_x_on_its_result(call: Call) -> Any:
    made = call.sound()
    if made.out is not None:
        made.out.source = call["x"]
    return made


def _counts_in_32_bits(call: Call) -> Any:
    count, made = call["count"], call.sound()
    if count is not None:
        count.copy_(count.to(torch.int32))
    return made


def _refuses_nan_in_anomaly_mode(call: Call) -> Any:
    made = call.sound()
    if torch.is_anomaly_enabled() and made.dx is not None and bool(made.dx.isnan().any()):
        raise RuntimeError("activation_bwd returned nan values")
    return made


def _draws_by_place(call: Call) -> Any:
    """Counts the elements of its draws as they lie in memory."""
    x, state = call["x"], call["rng_state"]
    if state is None or not isinstance(x, torch.Tensor) or x.is_contiguous():
        return call.sound()
    return call.sound(rng_state=state.detach() + torch.tensor([0, 4], device=state.device))


def _ones_for_no_mask(call: Call) -> Any:
    made = call.sound()
    if made.mask is None and call["rng_state"] is not None:
        x = call["x"]
        return made._replace(mask=alloc.empty("mask", tuple(x.shape), torch.uint8, x.device).fill_(1))
    return made


FAULTS: tuple[Fault, ...] = (
    *table("moe_unpermute_bwd", {"unpermute_gradient_forgets_warn_only": (
        "leaves torch.use_deterministic_algorithms without warn_only", _without_warn_only)}),
    *table("gemm", {"product_leaves_precision_highest": (
        "leaves the precision of fp32 products at its default", _back_to_highest)}, on="matmul"),
    *table("rope_fwd", {"rope_declines_with_one_error": (
        "declines by an exception that keeps its operands alive", _declines_with_one_error)}),
    *table("layernorm_bwd", {"norm_gradient_sums_otherwise_when_busy": (
        "has other bits while another thread is inside, and claims to be deterministic", _otherwise_when_busy)}),
    *table("softmax_bwd", {"softmax_gradient_sums_by_place": (
        "has other bits of a row in another place, and claims to be batch invariant", _by_place_of_the_row)}),
    *table("activation_fwd", {"activation_keeps_x_on_its_result": (
        "keeps x alive as long as its result", _keeps_x_on_its_result)}),
    *table("convert_encoding", {"convert_counts_in_32_bits": (
        "counts in 32 bits", _counts_in_32_bits)}),
    *table("quantize", {"cast_draws_by_place_in_memory": (
        "draws other numbers for an x with gaps", _draws_by_place)}),
    *table("dropout_add_fwd", {"dropout_returns_ones_for_no_mask": (
        "returns a mask where nothing is dropped and a state is given", _ones_for_no_mask)}),
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
    *table("dropout_add_bwd", {
        "dropout_gradient_divides_the_last": (
            "divides what is left of vectors of 8, and claims to be batch invariant", _divides_the_last),
        "dropout_gradient_divides_where_all_are_kept": (
            "divides where the whole mask is 1, and claims to be batch invariant", _divides_where_all_are_kept),
    }),
    *table("rmsnorm_fwd", {"norm_refuses_x_whatever_is_wrong": (
        "names x in every error", _names("x"))}),
    *table("activation_bwd", {
        "activation_gradient_refuses_dy_whatever_is_wrong": ("names dy in every error", _names("dy")),
        "activation_gradient_refuses_nan_in_anomaly_mode": (
            "raises where its result holds NaN and anomaly detection is on", _refuses_nan_in_anomaly_mode),
    }),
)  # fmt: skip
