# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of what else a training step needs. What each does wrong: `te_dispatch_faulty.catalogue`."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch_faulty.binding import Call


def does_not_rescale_kept(call: Call) -> Any:
    made = call.sound()
    if call["dropout_p"]:
        kept = call["x"].float() if call["bias"] is None else call["x"].float() + call["bias"]
        out = torch.where(made.mask != 0, kept, 0.0)
        made.out.copy_(out if call["residual"] is None else out + call["residual"])
    return made


def returns_dropped_as_mask(call: Call) -> Any:
    made = call.sound()
    if made.mask is not None:
        made.mask.copy_(1 - made.mask)
    return made


def drops_residual_too(call: Call) -> Any:
    made = call.sound()
    if made.mask is not None:
        made.out.mul_(made.mask)
    return made


def keeps_too_many(call: Call) -> Any:
    p = call["dropout_p"]
    made = call.sound(dropout_p=p / 2)
    if p:
        kept = call["x"].float() if call["bias"] is None else call["x"].float() + call["bias"]
        out = torch.where(made.mask != 0, kept / (1 - p), 0.0)
        made.out.copy_(out if call["residual"] is None else out + call["residual"])
    return made


def ignores_mask(call: Call) -> Any:
    mask = call["mask"]
    return call.sound(mask=None if mask is None else torch.ones_like(mask))


def returns_its_gradient(call: Call) -> Any:
    return call["dy"] if call["mask"] is None else call.sound()


def corrects_next_step(call: Call) -> Any:
    return call.sound(step=call["step"] + 1)


def decays_through_moments(call: Call) -> Any:
    return call.sound(adam_w=False)


def steps_in_spite_of_flag(call: Call) -> Any:
    return call.sound(noop_flag=None)


def leaves_parameters_behind(call: Call) -> Any:
    before = [p.clone() for p in call["params"]]
    call.sound()
    if call["master"] is not None:
        for p, old in zip(call["params"], before):
            p.copy_(old)


def squares_in_half(call: Call) -> Any:
    norms = torch.stack([t.square().sum(dtype=torch.float32).sqrt() for t in call["tensors"]])
    return call.delivered(norms if call["per_tensor"] else norms.square().sum().sqrt().view(1))


def raises_no_flag(call: Call) -> Any:
    return call.sound(noop_flag=None)


def scales_first_tensor_only(call: Call) -> Any:
    call.sound()
    for source, target in list(zip(call["inputs"], call["outputs"]))[1:]:
        target.copy_(source)


def sorts_unstably(call: Call) -> Any:
    tokens = call["indices"].shape[0]
    probs = call["probs"]
    x = call["x"]
    if not isinstance(x, torch.Tensor) or tokens < 2:
        return call.sound()
    made = call.sound(x=x.flip(0), indices=call["indices"].flip(0), probs=None if probs is None else probs.flip(0))
    made.row_map.copy_(made.row_map.flip(0))
    return made


def keeps_dropped_choices(call: Call) -> Any:
    return call.sound(indices=call["indices"].clamp_min(0))


def ignores_probabilities(call: Call) -> Any:
    return call.sound(probs=None)


def sums_choices_in_bf16(call: Call) -> Any:
    made = call.sound()
    x, row_map, probs = call["x"], call["row_map"], call["probs"]
    if not x.shape[0]:
        return made
    total = torch.zeros_like(made)
    for choice in range(row_map.shape[1]):
        rows = torch.where((row_map[:, choice] >= 0).unsqueeze(-1), x[row_map[:, choice].clamp_min(0)], 0)
        if probs is not None:
            rows = (rows * torch.where(row_map[:, choice] >= 0, probs[:, choice], 0).unsqueeze(-1)).to(x.dtype)
        total = total + rows
    return made.copy_(total)


def leaves_unweighted(call: Call) -> Any:
    made = call.sound()
    return made if call["probs"] is None else made._replace(dinput=call.sound(probs=None).dinput)
