# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of conduct: memory, forms, bits, threads, processes. What each does wrong: `te_dispatch_faulty.catalogue`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

from te_dispatch.core.errors import Declined
from te_dispatch.ops import alloc
from te_dispatch_faulty.binding import Call

_kept: dict[Any, torch.Tensor] = {}


def leaves_tail_unwritten(call: Call) -> Any:
    made = call.sound()
    raw = alloc.empty("out", tuple(made.shape), made.dtype, made.device)
    whole = made.numel() // 8 * 8
    raw.view(-1)[:whole] = made.view(-1)[:whole]
    return raw


def _written_outside(call: Call, place: int) -> Any:
    made = call.sound()
    if not made.numel() or not made.storage_offset():
        return made  # memory of PyTorch's own, which has no room around it
    element = made.storage_offset() + (place if place < 0 else made.numel())
    outside = torch.empty(0, dtype=made.dtype, device=made.device).set_(made.untyped_storage(), element, (1,), (1,))
    outside.fill_(1.0)
    return made


def writes_past_the_end(call: Call) -> Any:
    return _written_outside(call, 0)


def writes_before_the_start(call: Call) -> Any:
    return _written_outside(call, -1)


def changes_its_input(call: Call) -> Any:
    made = call.sound()
    call["x"].mul_(2)
    return made


def returns_its_input(call: Call) -> Any:
    made = call.sound()
    return call["x"].copy_(made) if made.dtype == call["x"].dtype else made


def declines_after_writing(call: Call) -> Any:
    call["x"].mul_(2)
    raise Declined("rows of this length are not served")


def returns_other_dtype(call: Call) -> Any:
    return call.sound().double()


def returns_other_shape(call: Call) -> Any:
    return call.sound().view(-1)


def returns_other_type(call: Call) -> Any:
    return (call.sound(),)


def returns_other_device(call: Call) -> Any:
    return call.sound().to("meta")


def returns_nothing(call: Call) -> Any:
    call.sound()


def shares_output_memory(call: Call) -> Any:
    made = call.sound()
    key = (tuple(made.shape), made.dtype)
    return _kept.setdefault(key, made).copy_(made)


def ignores_strides(call: Call) -> Any:
    x = call["x"]
    return call.sound(x=x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()))


def raises_unexpectedly(call: Call) -> Any:
    raise RuntimeError("kernel launch failed")


def shares_workspace(call: Call) -> Any:
    x = call["x"]
    workspace = _kept.setdefault(("workspace", tuple(x.shape), x.dtype), torch.empty_like(x))
    workspace.copy_(x)
    time.sleep(0.002)  # as long as a kernel may take between writing it and reading it
    return call.sound(x=workspace)


def sums_in_any_order(call: Call) -> Any:
    x, mask = call["x"], call["mask"]
    if call["causal"] or x.shape[-1] < 2:
        return call.sound()
    order = torch.randperm(x.shape[-1], device=x.device)
    if mask is not None:
        mask = mask.broadcast_to(x.shape)[..., order]
    made = call.sound(x=x[..., order], mask=mask)
    return made.copy_(made[..., order.argsort()])


def splits_by_row_count(call: Call) -> Any:
    call.sound()  # refuses what has to be refused
    y, dy = call["y"].float(), call["dy"].float()
    product = y * dy
    rows = y.numel() // max(y.shape[-1], 1)
    width = 3 + rows % 7
    total = torch.zeros((*y.shape[:-1], 1), device=y.device)
    for start in range(0, y.shape[-1], width):
        total = total + product[..., start : start + width].sum(-1, keepdim=True)
    dtype = call["out_dtype"] or call["y"].dtype
    return call.delivered((call["scale"] * (product - y * total)).to(dtype))


def crashes(call: Call) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(call: Call) -> Any:
    while True:
        time.sleep(1)


def exits(call: Call) -> Any:
    os._exit(3)


def raises_system_exit(call: Call) -> Any:
    sys.exit("no licence")
