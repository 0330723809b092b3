# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls that were made before: their graphs, or, in its own words, why cuDNN has none."""

from __future__ import annotations

import atexit
import threading

import torch

from te_dispatch.backend_kit.caches import BoundedDict
from te_dispatch.ops.attention_spec import AttentionSpec
from te_dispatch_cuda.attention import assemble, frontend
from te_dispatch_cuda.attention.assemble import Call

#: Graphs of one direction. Building one takes tens of milliseconds.
CAPACITY = 1024

#: (spec, inference, with_max_logit) and (spec, with_dbias)
FORWARDS: BoundedDict[tuple[AttentionSpec, bool, bool], Call] = BoundedDict(CAPACITY)
BACKWARDS: BoundedDict[tuple[AttentionSpec, bool], Call] = BoundedDict(CAPACITY)
_building = threading.Lock()


def _release() -> None:
    """Graphs must be gone before the module that made them is, else it reports leaks; calls may be kept elsewhere."""
    for known in (FORWARDS, BACKWARDS):
        for call in known.values():
            call.graph = None  # type: ignore[assignment]
        known.clear()


atexit.register(_release)


def forward(spec: AttentionSpec, inference: bool, with_max_logit: bool) -> Call:
    """The call of a forward that was not made before; with its backward's, unless none will follow."""
    frontend.refuse_capture(spec.device, "cuda.cudnn_attention")
    with _building, torch.cuda.device(spec.device):
        call = assemble.forward(spec, inference, with_max_logit)
        if not inference and call.refused is None and not call.copied:
            # With a bias the backward is asked for its gradient as a rule, and that is the harder graph.
            after = _backward(spec, spec.bias is not None)
            if after.refused is not None:
                call = Call(spec, refused=f"no backward: {after.refused}")
        FORWARDS[spec, inference, with_max_logit] = call
    return call


def backward(spec: AttentionSpec, with_dbias: bool) -> Call:
    """The call of a backward that was not made before."""
    frontend.refuse_capture(spec.device, "cuda.cudnn_attention_bwd")
    with _building, torch.cuda.device(spec.device):
        return _backward(spec, with_dbias)


def _backward(spec: AttentionSpec, with_dbias: bool) -> Call:
    found = BACKWARDS.get((spec, with_dbias))
    if found is None:
        found = BACKWARDS[spec, with_dbias] = assemble.backward(spec, with_dbias)
    return found
