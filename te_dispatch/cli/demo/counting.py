# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What ran, and what FP8 lost: an observer of every operator call.

Calls are counted in every step. Saturation and underflow are looked at in some steps only, because looking costs more
than the cast. For a cast inside another operator (a norm that quantizes its output) the operator is run again without
its quantizer to get at the values that were cast.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.core.decision import Accepted
from te_dispatch.core.operator import Operator
from te_dispatch.numerics.encodings import encoding as find_encoding
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import BLOCK
from te_dispatch.torch_private import graph_task

#: What a cast is for. Weights are the float32 tensors given to a cast: under torch.autocast all others are bfloat16.
ROLES = ("activation", "weight", "gradient")

#: A quantized result -> the result that has the same values before the cast.
_BEFORE = {"y_quantized": "y", "out_quantized": "out", "dx_quantized": "dx"}

#: Beyond this factor of the largest value a value was clipped; below, it may be the rounding of 1 / scale_inv.
_CLIPPED = 1 + 2.0**-20


class Observer:
    """Give it to `te_dispatch.observe`.

    Attributes:
        phase: under which name calls are counted now.
        watching: whether casts are looked at now.
        calls: (phase, operator, implementation) -> how often.
        accepted: implementation -> the candidate, for its pieces and its distribution.
    """

    def __init__(self) -> None:
        self.phase = "training"
        self.watching = False
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.accepted: dict[tuple[str, str], Accepted] = {}
        self._casts: dict[str, list[torch.Tensor]] = {}
        self._looking = threading.local()

    def __call__(self, operator: Operator, accepted: Accepted, args: tuple[Any, ...], result: Any) -> None:
        if getattr(self._looking, "now", False):
            return  # a call of our own
        self.calls[self.phase, operator.name, accepted.id] += 1
        self.accepted[operator.name, accepted.id] = accepted
        if self.watching:
            self._looking.now = True
            try:
                self._look(operator, args, result)
            finally:
                self._looking.now = False

    def _look(self, operator: Operator, args: tuple[Any, ...], result: Any) -> None:
        with torch.no_grad():
            for name, quantized in _quantized_results(result):
                given = dict(zip(operator.signature.parameters, args))
                source = _source(operator, given, name)
                if source is not None:
                    role = _role(source, source is given["x"])
                    counts = lost(source, quantized, given["quantizer"].max_value * _CLIPPED)
                    self._casts.setdefault(role, []).append(counts)

    def casts(self) -> dict[str, dict[str, int]]:
        """Role -> how many values were cast, saturated, and became zero, in the steps that were watched."""
        found = {}
        for role in ROLES:
            counts = self._casts.get(role)
            if counts:
                values, saturated, underflowed = torch.stack(counts).sum(0).tolist()
                found[role] = {"values": values, "saturated": saturated, "underflowed": underflowed}
        return found

    def table(self) -> list[dict[str, Any]]:
        """Operator -> implementation -> calls, in the order of the operators' names."""
        rows = []
        for operator, implementation in sorted(self.accepted):
            accepted = self.accepted[operator, implementation]
            rows.append(
                {
                    "operator": operator,
                    "implementation": implementation,
                    "distribution": f"{accepted.distribution} {accepted.version}",
                    "pieces": [p.chosen.id for p in accepted.pieces.values() if p.chosen],
                    "calls": self.calls["training", operator, implementation],
                    "validation_calls": self.calls["validation", operator, implementation],
                }
            )
        return rows


def _quantized_results(result: Any) -> list[tuple[str, Quantized]]:
    if isinstance(result, Quantized):
        return [("", result)]
    fields = getattr(result, "_fields", ())
    return [(name, value) for name in fields if isinstance(value := getattr(result, name), Quantized)]


def _source(operator: Operator, given: dict[str, Any], name: str) -> torch.Tensor | None:
    """The values that were cast: an argument, or the operator's result without its quantizer."""
    if operator.name in ("quantize", "quantize_dbias"):
        return given["x"]  # type: ignore[no-any-return]
    if name not in _BEFORE:
        return None  # moves or converts what was cast before
    # In float32: these operators cast what they compute without rounding it to a dtype in between.
    changed: dict[str, Any] = {"quantizer": None}
    if "out_dtype" in given:
        changed["out_dtype"] = torch.float32
    else:
        changed |= {k: given[k].float() for k in ("x", "dy") if isinstance(given.get(k), torch.Tensor)}
    plain = getattr(ops, operator.name)(**given | changed)
    return getattr(plain, _BEFORE[name])  # type: ignore[no-any-return]


def _role(source: torch.Tensor, argument: bool) -> str:
    """`argument`: the source was given to the operator that cast it, rather than computed by it."""
    if graph_task() != -1:
        return "gradient"
    return "weight" if argument and source.dtype == torch.float32 else "activation"


def lost(source: torch.Tensor, quantized: Quantized, largest: float) -> torch.Tensor:
    """What a cast lost.

    Args:
        source: (..., K), the values before it.
        quantized: after it, 8 bits; its row-wise copy is looked at, or the column-wise where there is no other.
        largest: beyond this scaled magnitude a value counts as saturated.

    Returns:
        int64 (3,): values; those that saturated; those that are not zero and whose code is. NaN counts as a value only.
    """
    values = source.reshape(-1, source.shape[-1])
    codes, scale_inv = quantized.row_data, quantized.row_scale_inv
    if codes is None:
        values, codes, scale_inv = values.t(), quantized.col_data, quantized.col_scale_inv
    assert codes is not None and scale_inv is not None
    codes = codes.reshape(values.shape)
    encoding = find_encoding(quantized.encoding)
    magnitude = values.float().abs()
    scaled = magnitude / expanded_scales(scale_inv, quantized.scaling, quantized.scale_layout, tuple(values.shape))
    saturated = (scaled > largest).sum()
    zero = codes == 0 if encoding.fnuz else (codes & 0x7F) == 0
    underflowed = (zero & (magnitude > 0)).sum()
    return torch.stack([torch.full_like(saturated, values.numel()), saturated, underflowed])


def expanded_scales(scale_inv: torch.Tensor, scaling: str, layout: str, shape: Sequence[int]) -> torch.Tensor:
    """One scale_inv per value of a copy of `shape` (rows, contracted dimension), or one for all.

    Raises:
        ValueError: a scaling or a layout of scales that is not known here.
    """
    if scaling == "tensor":
        return scale_inv
    if scaling not in ("block_1d", "block_2d") or layout not in ("canonical", "gemm_1d", "gemm_2d"):
        raise ValueError(f"cannot read {scaling} scales in the layout {layout}")
    rows, columns = shape
    blocks = -(-columns // BLOCK[scaling])
    by_row = scale_inv.t() if layout == "gemm_1d" else scale_inv
    found = by_row[:, :blocks].repeat_interleave(BLOCK[scaling], 1)[:, :columns]
    if scaling == "block_2d":
        found = found.repeat_interleave(BLOCK[scaling], 0)
    return found[:rows]
