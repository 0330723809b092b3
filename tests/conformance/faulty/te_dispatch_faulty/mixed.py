# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults that show where what belongs together differs: the options of threads, the memory of operands, the sizes of
groups; and with values far from all others."""

from __future__ import annotations

import threading
from typing import Any

import torch

from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import operand, table

_scalars: dict[str, Any] = {}


def _scalars_in_process(call: Call) -> Any:
    """Each thread takes what was written last."""
    names = ("lr", "beta1", "beta2", "eps", "step", "weight_decay")
    _scalars.update({name: call[name] for name in names})
    torch.empty(1).fill_(float(call["lr"]))  # the upload
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
    *table("attention_fwd", {"attention_starts_with_minus_10000": (
        "gives 0 where all logits of a row are below -10,000", _maximum_from(-10_000.0))}, on="unfused_attention"),
    *table("gemm", {"dgelu_epilogue_squares_what_is_far": (
        "gives NaN where the square of what dgelu reads overflows", _square_overflows)}, on="matmul"),
)  # fmt: skip
