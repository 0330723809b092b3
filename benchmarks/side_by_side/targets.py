# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The layer's goals: ratios to a rival within one run, from the design's table of milliseconds on one H200."""

from __future__ import annotations

from dataclasses import dataclass

#: What the design's table has, in ms: (shape, mode) -> (rival's contestant and mode, its ms, the goal's ms).
_TABLE: dict[tuple[str, str], tuple[tuple[str, str], float, float]] = {
    ("A", "bf16"): (("transformer_engine", "bf16"), 17.3, 16.0),
    ("A", "delayed"): (("transformer_engine", "delayed"), 11.0, 9.8),
    ("A", "current"): (("transformer_engine", "current"), 11.5, 10.2),
    ("A", "block"): (("transformer_engine", "block"), 13.1, 11.5),
    ("A2", "bf16"): (("transformer_engine", "bf16"), 18.0, 17.0),
    ("A2", "delayed"): (("transformer_engine", "delayed"), 11.8, 10.6),
    ("A2", "current"): (("transformer_engine", "current"), 12.4, 11.0),
    ("A2", "block"): (("transformer_engine", "block"), 14.0, 12.3),
    # S is all host: plain PyTorch on the same host is the measure.
    **{("S", mode): (("torch+SDPA", "bf16"), 1.2, 1.1 if mode == "bf16" else 1.2) for mode in
       ("bf16", "delayed", "current", "block")},
}  # fmt: skip
#: Where Transformer Engine is missing: PyTorch on SDPA at the same shape.
_SDPA_MS = {"A": 17.4, "A2": 18.1, "S": 1.2}

#: The same layer on Triton's kernels alone, FP8 delayed at A: at most so many times Transformer Engine's.
TRITON, TRITON_RATIO = "te_dispatch, triton-only", 1.2

#: The layer as a CUDA graph, in any mode at S: at most so many times PyTorch's in eager.
GRAPHED, GRAPHED_RATIO = "te_dispatch, graphed", 0.35

#: A step's peak memory at A in FP8, in GiB.
PEAK_GIB = 1.5
#: One FP8 Linear, forward and backward, over torch.nn.Linear: 200 us where that takes 105.
LINEAR_RATIO = 200 / 105


@dataclass(frozen=True)
class LayerGoal:
    ms: float
    source: str


def triton_goal(shape: str, mode: str, measured: dict[tuple[str, str], float]) -> LayerGoal | None:
    """As `layer_goal`, of the layer under the policy ``triton-only``."""
    rival = measured.get(("transformer_engine", mode))
    if (shape, mode) != ("A", "delayed") or rival is None:
        return None
    return LayerGoal(TRITON_RATIO * rival, f"{TRITON_RATIO:.3f}x transformer_engine {mode}")


def graphed_goal(shape: str, mode: str, measured: dict[tuple[str, str], float]) -> LayerGoal | None:
    """As `layer_goal`, of the layer under `make_graphed_callables`."""
    rival = measured.get(("torch+SDPA", "bf16"))
    if shape != "S" or rival is None:
        return None
    return LayerGoal(GRAPHED_RATIO * rival, f"{GRAPHED_RATIO:.3f}x torch+SDPA bf16")


def layer_goal(shape: str, mode: str, measured: dict[tuple[str, str], float]) -> LayerGoal | None:
    """What the goal means in this run, from {(contestant, mode): ms} of this shape; None where no rival ran."""
    if (shape, mode) not in _TABLE:
        return None
    rival, rival_ms, goal_ms = _TABLE[shape, mode]
    for other, other_ms in ((rival, rival_ms), (("torch+SDPA", "bf16"), _SDPA_MS[shape])):
        if other in measured:
            ratio = goal_ms / other_ms
            return LayerGoal(ratio * measured[other], f"{ratio:.3f}x {other[0]} {other[1]}")
    return None
