# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls that were made before: their graphs, or, in its own words, why cuDNN has none."""

from __future__ import annotations

import atexit
import threading
from typing import Any

import torch

from te_dispatch.backend_kit.caches import BoundedDict
from te_dispatch_cuda.attention import assemble, frontend
from te_dispatch_cuda.attention.assemble import Call
from te_dispatch_cuda.attention.setting import Setting

Key = tuple[Any, ...]
#: Graphs of one direction. Building one takes tens of milliseconds.
CAPACITY = 1024

#: ((members of `Setting`), inference, with_max_logit) and ((members of `Setting`), with_dbias)
FORWARDS: BoundedDict[Key, Call] = BoundedDict(CAPACITY)
BACKWARDS: BoundedDict[Key, Call] = BoundedDict(CAPACITY)
_building = threading.Lock()


def _release() -> None:
    """Graphs must be gone before the module that made them is, else it reports leaks; calls may be kept elsewhere."""
    for known in (FORWARDS, BACKWARDS):
        for call in known.values():
            call.graph = None  # type: ignore[assignment]
        known.clear()


atexit.register(_release)


def forward(key: Key, inference: bool, with_max_logit: bool) -> Call:
    """The call of a forward that was not made before; with its backward's, unless none will follow."""
    setting = Setting(*key)
    frontend.refuse_capture(setting.device, "cuda.cudnn_attention")
    with _building, torch.cuda.device(setting.device):
        call = assemble.forward(setting, inference, with_max_logit)
        if not inference and call.refused is None and not call.copied:
            # With a bias the backward is asked for its gradient as a rule, and that is the harder graph.
            after = _backward(key, setting.bias is not None)
            if after.refused is not None:
                call = Call(setting, refused=f"no backward: {after.refused}")
        FORWARDS[key, inference, with_max_logit] = call
    return call


def backward(key: Key, with_dbias: bool) -> Call:
    """The call of a backward that was not made before."""
    setting = Setting(*key)
    frontend.refuse_capture(setting.device, "cuda.cudnn_attention_bwd")
    with _building, torch.cuda.device(setting.device):
        return _backward(key, with_dbias)


def _backward(key: Key, with_dbias: bool) -> Call:
    found = BACKWARDS.get((key, with_dbias))
    if found is None:
        found = BACKWARDS[key, with_dbias] = assemble.backward(Setting(*key), with_dbias)
    return found
