# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""cuDNN graphs of FP8 attention: operands with one scale each, casts of p, of its gradient and of the results."""

from __future__ import annotations

import atexit
import enum
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.memory import contiguous_strides
from te_dispatch.core.errors import Declined
from te_dispatch.ops.attention_spec import AttentionSpec
from te_dispatch_cuda.attention import frontend
from te_dispatch_cuda.attention.assemble import operands, unfit
from te_dispatch_cuda.attention.frontend import handle_of
from te_dispatch_cuda.attention.geometry import side
from te_dispatch_cuda.attention.graphs import Builder, Graph, Slot, refusal, rows_of, up

ENCODINGS = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
#: Of the gradients, where the forward cannot know them yet.
USUAL = ("e5m2", "e5m2")


class Scale(enum.IntEnum):
    """Scalars of a graph, behind the tensors of `Slot`. OF: what a code is multiplied with; BY: what it was."""

    OF_Q = Slot.OFFSETS
    OF_K = 21
    OF_V = 22
    OF_S = 23
    BY_S = 24
    BY_OUT = 25
    AMAX_S = 26
    AMAX_OUT = 27
    OF_OUT = 28
    OF_DOUT = 29
    OF_DP = 30
    BY_DP = 31
    BY_DQKV = 32
    BY_DQKV_2 = 33
    BY_DQKV_3 = 34
    AMAX_DQ = 35
    AMAX_DK = 36
    AMAX_DV = 37
    AMAX_DP = 38


class Call(NamedTuple):
    """One kind of call. `scalars_at`: 8 fp32 numbers in the workspace, 16 bytes apart."""

    refused: str | None
    unfit: bool = False
    graph: Graph | None = None
    bytes: int = 0
    scalars_at: int = 0


#: (spec, whether inference, or what the gradients are encoded as)
CALLS: dict[Any, Call] = {}
_building = threading.Lock()
atexit.register(CALLS.clear)

#: Bytes from one scalar in the workspace to the next.
STEP = 16
_COUNT = 8


def forward(spec: AttentionSpec, inference: bool) -> Call:
    """A forward that was not made before; with its backward's graph, unless none will follow."""
    frontend.refuse_capture(spec.device, "cuda.cudnn_fp8_attention")
    with _building, torch.cuda.device(spec.device):
        call = _attempt(spec, lambda s: _forward(s, inference))
        if not inference and call.graph is not None:
            after = _backward_call(spec, USUAL)
            if after.refused is not None:
                call = Call(f"no backward: {after.refused}")
        CALLS[spec, inference] = call
    return call


def backward(spec: AttentionSpec, encodings: tuple[str, str]) -> Call:
    """A backward; encodings: of dout, of the results."""
    frontend.refuse_capture(spec.device, "cuda.cudnn_fp8_attention_bwd")
    with _building, torch.cuda.device(spec.device):
        return _backward_call(spec, encodings)


def _backward_call(spec: AttentionSpec, encodings: tuple[str, str]) -> Call:
    found = CALLS.get((spec, encodings))
    if found is None:
        found = CALLS[spec, encodings] = _attempt(spec, lambda s: _backward(s, *encodings))
    return found


def _attempt(spec: AttentionSpec, build: Callable[[AttentionSpec], Graph]) -> Call:
    """`build` is given the spec with the dtype of the quantized values; the operator's is the nominal one."""
    spec = spec._replace(dtype=torch.float8_e4m3fn)
    if unfit(spec):
        return Call(None, unfit=True)
    try:
        graph = build(spec)
    except Declined as declined:
        return Call(str(declined))
    except (RuntimeError, TypeError, ValueError) as error:
        return Call(refusal(error))
    return Call(None, False, graph, graph.bytes + up(STEP * _COUNT), graph.bytes)


def _scalars(b: Builder, **slots: Scale) -> dict[str, Any]:
    return {name: b.tensor(slot, (1, 1, 1, 1), (1, 1, 1, 1), torch.float32) for name, slot in slots.items()}


def _masks(b: Builder) -> dict[str, Any]:
    """FP8 graphs name the bounds otherwise."""
    options = b.options()
    names = {"diagonal_band_left_bound": "left_bound", "diagonal_band_right_bound": "right_bound"}
    return {names.get(name, name): value for name, value in options.items()}


def _forward(s: AttentionSpec, inference: bool) -> Graph:
    b = Builder(s, handle_of(s.device.index, 0))
    e = b.extents
    scales = _scalars(
        b, descale_q=Scale.OF_Q, descale_k=Scale.OF_K, descale_v=Scale.OF_V, descale_s=Scale.OF_S, scale_s=Scale.BY_S,
        scale_o=Scale.BY_OUT,
    )  # fmt: skip
    out, lse, amax_s, amax_out = b.graph.sdpa_fp8(
        *operands(b), **scales, generate_stats=not inference, name="sdpa_fp8", **_masks(b)
    )
    shape = s.out_shape
    b.result(out, Slot.OUT, side(shape, contiguous_strides(shape), s.layout, e.batch, e.rows), False)
    if not inference:
        b.result(lse, Slot.LSE, rows_of(e, False), False, torch.float32)
    b.single_result(amax_s, Scale.AMAX_S)
    b.single_result(amax_out, Scale.AMAX_OUT)
    return b.done()


def _backward(s: AttentionSpec, of_dout: str, of_results: str) -> Graph:
    b = Builder(s, handle_of(s.device.index, 0))
    e = b.extents
    shape = s.out_shape
    out = side(shape, contiguous_strides(shape), s.layout, e.batch, e.rows)
    scales = _scalars(
        b, descale_q=Scale.OF_Q, descale_k=Scale.OF_K, descale_v=Scale.OF_V, descale_o=Scale.OF_OUT,
        descale_dO=Scale.OF_DOUT, descale_s=Scale.OF_S, descale_dP=Scale.OF_DP, scale_s=Scale.BY_S,
        scale_dQ=Scale.BY_DQKV, scale_dK=Scale.BY_DQKV_2, scale_dV=Scale.BY_DQKV_3, scale_dP=Scale.BY_DP,
    )  # fmt: skip
    made = b.graph.sdpa_fp8_backward(
        *operands(b), b.operand(Slot.OUT, out, False), b.operand(Slot.DOUT, out, False, ENCODINGS[of_dout]),
        b.operand(Slot.LSE, rows_of(e, False), False, torch.float32), **scales, name="sdpa_fp8_backward", **_masks(b),
    )  # fmt: skip
    results = ((Slot.DQ, s.q_shape, e.rows), (Slot.DK, s.k_shape, e.columns), (Slot.DV, s.v_shape, e.columns))
    for x, (slot, like, rows) in zip(made[:3], results, strict=True):
        lies = side(like, contiguous_strides(like), s.layout, e.batch, rows)
        b.result(x, slot, lies, slot != Slot.DQ, ENCODINGS[of_results])
    amaxes = (Scale.AMAX_DQ, Scale.AMAX_DK, Scale.AMAX_DV, Scale.AMAX_DP)
    for x, amax in zip(made[3:7], amaxes, strict=True):
        b.single_result(x, amax)
    return b.done()
