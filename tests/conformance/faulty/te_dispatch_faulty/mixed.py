# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults that show where what belongs together differs: the options of threads, the memory of operands, the sizes of
groups; and with values far from all others."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Memory, operand, remembering, table, with_members

_scalars: dict[str, Any] = {}


def _scalars_in_process(call: Call) -> Any:
    """Each thread takes what was written last."""
    names = ("lr", "beta1", "beta2", "eps", "step", "weight_decay")
    _scalars.update({name: call[name] for name in names})
    torch.empty(1, device="cpu").fill_(float(call["lr"]))  # the upload
    return call.sound(**{name: _scalars[name] for name in names})


def _otherwise_elsewhere(call: Call) -> Any:
    """A constant that only the main thread's table has."""
    if threading.current_thread() is threading.main_thread() or call["kind"] not in ("qgelu", "qgeglu"):
        return call.sound()
    return call.sound(kind={"qgelu": "silu", "qgeglu": "swiglu"}[call["kind"]])


def _dense_state(call: Call) -> Any:
    """Reads the element behind the seed as the offset."""
    state = operand(call, "rng_state")
    if state is None or state.stride(0) == 1:
        return call.sound()
    return call.sound(rng_state=state.detach().as_strided((2,), (1,)))


def _masters_in_memory_order(call: Call) -> Any:
    """Walks through memory, which pairs elements of a parameter with others of its transposed master."""
    turned = [
        x.detach().as_strided(x.shape, (x.shape[1], 1))
        if x.dim() == 2 and p.is_contiguous() and not x.is_contiguous() and x.t().is_contiguous() else x
        for p, x in zip(call["params"], call["master"] or ())
    ]  # fmt: skip
    return call.sound(master=turned) if turned else call.sound()


def _first_width(call: Call) -> Any:
    made = call.sound()
    width = made[0].shape[-1] if made else 0
    for one in made:
        one.detach()[..., width:] = 0
    return made


def _last_tokens_rounded_once(call: Call) -> Any:
    """Vectors of 4 tokens in separate steps, what is left behind them with fused multiply-add."""
    made = call.sound()
    dy, freqs = call["dy"].detach(), call["freqs"].detach()
    axis = 1 if call["layout"] == "bshd" else 0
    left = dy.shape[axis] % 4
    if not left or call["offsets"] is not None or call["layout"] == "thd" or not dy.numel():
        return made
    first, r = dy.shape[axis] - left, freqs.shape[-1]
    angles = freqs.reshape(freqs.shape[0], r)[first : first + left].double()
    angles = angles[None, :, None] if axis else angles[:, None, None]
    x = dy.narrow(axis, first, left)[..., :r].double()
    s = x * angles.sin().float().double()
    if call["interleaved"]:
        pairs = s.unflatten(-1, (-1, 2))
        turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    else:
        u, v = s.chunk(2, -1)
        turned = torch.cat((-v, u), -1)
    made.narrow(axis, first, left)[..., :r].copy_((x * angles.cos().float().double() - turned).float())
    return made


def _maximum_from(floor: float) -> Any:
    """The running maximum of a row of logits starts with `floor`, not with -Inf."""

    def behave(call: Call) -> Any:
        from te_dispatch_torch import scores

        sound = scores.scores_of

        def low(s: Any) -> Any:
            found = sound(s)
            if not found.z.numel():
                return found
            top = found.z.amax(-1, keepdim=True)
            lost = (top < floor - 104.0) & (top > float("-inf"))  # e^-104 is 0 in fp32
            return found._replace(p=found.p.masked_fill(lost, 0.0))

        with swapped(("attention_unfused", "scores_of", low)):
            return call.sound()

    return behave


def _square_overflows(call: Call) -> Any:
    """(1 - tanh^2) x^2 is NaN where x^2 overflows."""
    made, aux = call.sound(), call["aux"]
    if call["epilogue"] != "dgelu" or not isinstance(aux, torch.Tensor) or not isinstance(made.out, torch.Tensor):
        return made
    aux = aux.detach().float()
    lost = torch.isinf(aux * aux) & aux.isfinite()
    made.out.detach().masked_fill_(lost.view(made.out.shape), float("nan"))
    if made.dbias is not None:
        made.dbias.masked_fill_(lost.reshape(-1, lost.shape[-1]).any(0), float("nan"))
    return made


def _maximum_of_logits(call: Call) -> Any:
    """The sink's exponential overflows where it lies more than 88 above the row's largest logit."""
    from te_dispatch_torch import scores

    sound = scores.scores_of

    def over(s: Any) -> Any:
        found = sound(s)
        if s.sink is None or not found.z.numel():
            return found
        lost = s.sink - found.z.amax(-1, keepdim=True) > 88.7
        return found._replace(p=found.p.masked_fill(lost, float("nan")))

    with swapped(("attention_unfused", "scores_of", over)):
        return call.sound()


def _exponent_by_log2(call: Call) -> Any:
    """Just above a power of two, log2 in fp32 gives its integer."""
    from te_dispatch_torch import blocks

    sound = blocks.e8m0_from_amax

    def exponent(amax: torch.Tensor, max_value: float) -> torch.Tensor:
        ratio = amax / torch.full_like(amax, max_value)
        usable = (ratio >= torch.finfo(torch.float32).tiny) & torch.isfinite(ratio)
        found = (torch.ceil(torch.log2(torch.where(usable, ratio, 1.0))) + 127.0).clamp(0.0, 254.0)
        return torch.where(usable, found.to(torch.uint8), sound(amax, max_value))

    with swapped(("blocks", "e8m0_from_amax", exponent)):
        return call.sound()


@remembering
def _one_orientation(call: Call, memory: Memory) -> Any:
    """Finds the weight that it has unpacked by its record, and forgets that a layout turns it."""
    b = call["b"]
    if not isinstance(b, Quantized) or b.row_data is None or b.col_data is None or b.scaling != "tensor":
        return call.sound()
    side, kept = call["layout"][1], memory.kept.get("weight")
    square = b.row_data.dim() == 2 and b.row_data.shape == b.col_data.shape
    if square and kept is not None and kept[0]() is b.row_data and kept[1] != side:
        turned = {name: getattr(b, name).t().contiguous() for name in ("row_data", "col_data")}
        return call.sound(b=with_members(b, **turned))
    memory.kept["weight"] = (weakref.ref(b.row_data), side)
    return call.sound()


FAULTS: tuple[Fault, ...] = (
    *table("multi_tensor_adam", {
        "adam_keeps_scalars_in_the_process": (
            "keeps the learning rate and the others where all threads write them", _scalars_in_process),
        "adam_walks_masters_in_memory": ("reads and writes transposed masters as dense", _masters_in_memory_order),
    }),
    *table("activation_bwd", {"qgelu_gradient_has_its_constant_in_one_thread": (
        "takes 1 for 1.702 in other threads than the main one", _otherwise_elsewhere)}),
    *table("dropout_add_fwd", {"dropout_reads_a_gapped_state_as_dense": (
        "reads the element behind the seed as the offset", _dense_state)}),
    *table("grouped_gemm", {"grouped_has_the_width_of_the_first": (
        "computes as many columns as the first group has", _first_width)}, on="grouped_matmul"),
    *table("rope_bwd", {"rope_gradient_rounds_its_last_tokens_once": (
        "rounds what is left of vectors of 4 tokens otherwise, and claims to be batch invariant",
        _last_tokens_rounded_once)}),
    *table("attention_fwd", {
        "attention_starts_with_minus_10000": (
            "gives 0 where all logits of a row are below -10,000", _maximum_from(-10_000.0)),
        "attention_offset_has_no_part_in_the_maximum": (
            "overflows where the softmax's offset is far above the logits", _maximum_of_logits),
    }, on="unfused_attention"),
    *table("quantize", {"mxfp8_takes_log2_in_fp32": (
        "rounds MXFP8's exponent up behind a logarithm in fp32", _exponent_by_log2)}),
    *table("gemm", {"fp8_product_turns_a_square_weight": (
        "reads a square weight for another layout as it had unpacked it", _one_orientation)}, on="emulated_gemm"),
    *table("gemm", {"dgelu_epilogue_squares_what_is_far": (
        "gives NaN where the square of what dgelu reads overflows", _square_overflows)}, on="matmul"),
)  # fmt: skip
