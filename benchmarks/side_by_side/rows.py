# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The rows of the operators' benchmark: what is done, on which shape, how many bytes must move, what the goal is.

`Row.moved` counts the fewest bytes that can do the work: each input read once, each output written once. Current
scaling reads its input twice, because no scale is known before the last element was seen and no cache holds the rest.
The goals are those of the design's table; where it has none, a kernel bound by memory is held to the copy too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

#: Shape A of the design: tokens, hidden, ffn.
TOKENS, HIDDEN, FFN = 8192, 4096, 16384
#: The fewest that still are what the row says; the host's time is measured on these.
SMALL_TOKENS, SMALL_HIDDEN = 64, 256

COPY, FAST_COPY = 1.10, 1.05
#: Two figures of one kernel differ by so much from run to run.
NOISE = 1.01


@dataclass(frozen=True)
class Goal:
    """At most `ratio` times the fastest of `rivals` that ran."""

    ratio: float
    rivals: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.ratio:.3g}x {' or '.join(self.rivals)}"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: unique; what `--ops` filters.
        operation: what rivals look up.
        shape: sizes for the device's time; small: for the host's.
        options: of the operation.
        moved: bytes per call at `shape`, 0 where arithmetic decides.
        flops: per call at `shape`, 0 where memory decides.
        group: rows whose times are also shown added up, such as a layer's GEMMs.
        tolerance: ||out - expected|| / ||expected|| of every result: what its encoding leaves.
    """

    name: str
    operation: str
    shape: tuple[int, ...]
    small: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    moved: int = 0
    flops: int = 0
    tolerance: float = 0.02
    goal: Goal | None = None
    group: str = ""


#: Relative error of a cast: half a step of 3 or 2 mantissa bits, over a binade, with room for subnormals.
_CAST = {"e4m3fn": 0.04, "e5m2": 0.08}
_FIRST = {"delayed": 1, "current": 2, "block": 1}
_COPIES = {"row": 1, "both": 2}


def alternate_goal(row: Row) -> Goal:
    """What the Triton backend is held to: a share of the CUDA backend's speed, which is cuBLASLt's and cuDNN's.

    A GEMM's at 8192 cubed, at a layer's shapes; attention's forward, and both ways (0.7 of its forward and 0.6 of its
    backward, which is about three times as long); 0.9 of what memory bounds.
    """
    if row.operation == "attention":
        share = 0.62 if row.options["backward"] else 0.7
    elif row.flops:
        share = 0.8 if set(row.shape) == {TOKENS} else 0.75
    else:
        share = 0.9
    return Goal(1 / share, ("cuda",))


def _copy_goal(scaling: str | None) -> Goal:
    return Goal(FAST_COPY if scaling in (None, "delayed") else COPY, ("copy",))


def _casts() -> Iterator[Row]:
    for k in (HIDDEN, FFN):
        for scaling, usage in (("delayed", "row"), ("delayed", "both"), ("current", "both"), ("block", "both")):
            copies = _COPIES[usage]
            yield Row(
                f"{scaling} cast{' + transpose' if copies == 2 else ''} {TOKENS}x{k}",
                "quantize",
                (TOKENS, k),
                (SMALL_TOKENS, SMALL_HIDDEN),
                {"scaling": scaling, "usage": usage, "encoding": "e4m3fn"},
                moved=TOKENS * k * (2 * _FIRST[scaling] + copies),
                tolerance=_CAST["e4m3fn"],
                goal=_copy_goal(scaling),
            )
    yield Row(
        f"block 128x128 cast + transpose {FFN}x{HIDDEN}",
        "quantize",
        (FFN, HIDDEN),
        (256, 256),
        {"scaling": "block_2d", "usage": "both", "encoding": "e4m3fn"},
        moved=FFN * HIDDEN * 4,
        tolerance=_CAST["e4m3fn"],
        goal=_copy_goal("block"),
    )
    for scaling in ("delayed", "current"):
        yield Row(
            f"{scaling} cast + transpose + bias gradient {TOKENS}x{HIDDEN}",
            "quantize_dbias",
            (TOKENS, HIDDEN),
            (SMALL_TOKENS, SMALL_HIDDEN),
            {"scaling": scaling, "usage": "both", "encoding": "e5m2"},
            moved=TOKENS * HIDDEN * (2 * _FIRST[scaling] + 2),
            tolerance=_CAST["e5m2"],
            goal=_copy_goal(scaling),
        )
    yield Row(
        f"dequantize {TOKENS}x{HIDDEN}",
        "dequantize",
        (TOKENS, HIDDEN),
        (SMALL_TOKENS, SMALL_HIDDEN),
        {"scaling": "delayed", "usage": "row", "encoding": "e4m3fn"},
        moved=TOKENS * HIDDEN * 3,
        tolerance=_CAST["e4m3fn"],
        goal=_copy_goal(None),
    )
    yield Row(
        "update of delayed scales, 1024x24",
        "update_scales",
        (1024, 24),
        (16, 24),
        goal=Goal(1.0, ("transformer_engine",)),
    )


def _norms() -> Iterator[Row]:
    elements = TOKENS * HIDDEN
    shapes: dict[str, Any] = {"shape": (TOKENS, HIDDEN), "small": (SMALL_TOKENS, SMALL_HIDDEN)}
    for kind in ("layernorm", "rmsnorm"):
        yield Row(
            f"{kind} fwd", "norm_fwd", options={"kind": kind}, moved=4 * elements, goal=_copy_goal(None), **shapes
        )
        yield Row(
            f"{kind} fwd + residual add",
            "norm_fwd",
            options={"kind": kind, "residual": True},
            moved=8 * elements,
            goal=_copy_goal(None),
            **shapes,
        )
        for scaling in ("delayed", "current", "block"):
            yield Row(
                f"{kind} fwd + {scaling} cast + transpose",
                "norm_fwd",
                options={"kind": kind, "scaling": scaling, "usage": "both", "encoding": "e4m3fn"},
                # Current scaling meets the norm's input twice: for the amax, and for the cast.
                moved=elements * (2 * _FIRST[scaling] + 2),
                tolerance=_CAST["e4m3fn"],
                goal=_copy_goal(scaling),
                **shapes,
            )
        yield Row(
            f"{kind} bwd", "norm_bwd", options={"kind": kind}, moved=6 * elements, goal=_copy_goal(None), **shapes
        )
        yield Row(
            f"{kind} bwd + residual's gradient",
            "norm_bwd",
            options={"kind": kind, "add": True},
            moved=8 * elements,
            goal=_copy_goal(None),
            **shapes,
        )


def _activations() -> Iterator[Row]:
    small = (SMALL_TOKENS, 2 * SMALL_HIDDEN)
    elements = TOKENS * FFN
    for kind in ("gelu", "swiglu"):
        outputs = elements // 2 if kind == "swiglu" else elements
        for scaling in (None, "delayed", "current", "block"):
            cast = {"scaling": scaling, "usage": "both", "encoding": "e4m3fn"} if scaling else {}
            passes = _FIRST[scaling] if scaling else 1
            tail = f" + {scaling} cast + transpose" if scaling else ""
            yield Row(
                f"{kind} fwd{tail}",
                "activation_fwd",
                (TOKENS, FFN),
                small,
                {"kind": kind, **cast},
                moved=2 * elements * passes + 2 * outputs,
                tolerance=_CAST["e4m3fn"] if scaling else 0.01,
                goal=_copy_goal(scaling),
            )
        for scaling in (None, "delayed", "current", "block"):
            # Block scaling has gradients in E4M3; a bias follows gelu alone.
            encoding = "e4m3fn" if scaling == "block" else "e5m2"
            cast = {"scaling": scaling, "usage": "both", "encoding": encoding} if scaling else {}
            passes = _FIRST[scaling] if scaling else 1
            tail = f" + {scaling} cast + transpose" if scaling else ""
            yield Row(
                f"{kind} bwd{tail}{' + bias gradient' if kind == 'gelu' else ''}",
                "activation_bwd",
                (TOKENS, FFN),
                small,
                {"kind": kind, "dbias": kind == "gelu", **cast},
                moved=(2 * elements + 2 * outputs) * passes + 2 * elements,
                tolerance=_CAST[encoding] if scaling else 0.02,
                goal=_copy_goal(scaling),
            )


def _others() -> Iterator[Row]:
    scores, small_scores = (4, 32, 1024, 1024), (1, 2, 64, 64)
    count = 4 * 32 * 1024 * 1024
    common: dict[str, Any] = {"shape": scores, "small": small_scores, "goal": _copy_goal(None)}
    yield Row("softmax fwd", "softmax_fwd", options={"causal": False}, moved=4 * count, **common)
    yield Row("softmax fwd, causal", "softmax_fwd", options={"causal": True}, moved=3 * count, **common)
    yield Row("softmax bwd", "softmax_bwd", moved=6 * count, **common)
    heads, small_heads = (2048, 4, 32, 128), (32, 2, 4, 64)
    common = {"shape": heads, "small": small_heads, "moved": 4 * TOKENS * HIDDEN, "goal": _copy_goal(None)}
    yield Row("rope fwd", "rope_fwd", **common)
    yield Row("rope bwd", "rope_bwd", **common)
    rows: dict[str, Any] = {"shape": (TOKENS, HIDDEN), "small": (SMALL_TOKENS, SMALL_HIDDEN)}
    yield Row(
        "bias + dropout + add",
        "dropout_add",
        options={"p": 0.1},
        moved=7 * TOKENS * HIDDEN,
        goal=_copy_goal(None),
        tolerance=0.03,
        **rows,
    )
    yield Row(
        "bias + add (dropout 0)",
        "dropout_add",
        options={"p": 0.0},
        moved=6 * TOKENS * HIDDEN,
        goal=_copy_goal(None),
        **rows,
    )
    many, few = (6, HIDDEN, HIDDEN), (6, 64, 64)
    total = 6 * HIDDEN * HIDDEN
    common = {"shape": many, "small": few, "goal": _copy_goal(None)}
    yield Row("adam, fp32", "adam", options={"master": False}, moved=28 * total, **common)
    yield Row("adam, bf16 with fp32 master", "adam", options={"master": True}, moved=28 * total, **common)
    yield Row("l2 norm of bf16 gradients", "l2norm", moved=2 * total, **common)


#: Weights of a layer at shape A: (output features, input features).
WEIGHTS = {"qkv": (3 * HIDDEN, HIDDEN), "proj": (HIDDEN, HIDDEN), "fc1": (FFN, HIDDEN), "fc2": (HIDDEN, FFN)}


def _gemm(name: str, kind: str, m: int, n: int, k: int, group: str = "", **options: Any) -> Row:
    # The casts of both operands are in it: sqrt(2) times theirs, gradients in E5M2.
    error = {"bf16": 0.01, "delayed": 0.09, "block": 0.06}[options["scaling"]]
    return Row(
        name,
        "gemm",
        (m, n, k),
        (128, 256, 128),
        {"kind": kind, **options},
        flops=2 * m * n * k,
        tolerance=error,
        goal=Goal(NOISE, ("transformer_engine", "pytorch")),
        group=group,
    )


def _gemms() -> Iterator[Row]:
    for scaling in ("delayed", "block", "bf16"):
        title = {"delayed": "fp8", "block": "fp8 blocks", "bf16": "bf16"}[scaling]
        for weight, (out, features) in WEIGHTS.items():
            if scaling != "delayed" and weight in ("qkv", "proj"):
                continue
            sizes = {
                "fprop": (TOKENS, out, features),
                "dgrad": (TOKENS, features, out),
                "wgrad": (out, features, TOKENS),
            }
            for kind, (m, n, k) in sizes.items():
                group = "the 12 FP8 GEMMs of a layer at shape A" if scaling == "delayed" else ""
                yield _gemm(f"gemm {title} {weight} {kind} {m}x{n}x{k}", kind, m, n, k, group, scaling=scaling)
        yield _gemm(f"gemm {title} 8192x8192x8192", "fprop", 8192, 8192, 8192, scaling=scaling)


def _attention() -> Iterator[Row]:
    # (s, b, h, d), causal; the figures of the design's table, over PyTorch's SDPA on cuDNN or TE's.
    long = ("pytorch", "transformer_engine")
    goals = {
        (256, 32, 32, 128): (Goal(75 / 76, ("pytorch",)), Goal(380 / 564, ("pytorch",))),
        (2048, 4, 32, 128): (Goal(NOISE, long), Goal(NOISE, long)),
        (8192, 1, 32, 128): (Goal(NOISE, long), Goal(NOISE, long)),
    }
    for (s, b, h, d), (forward, both) in goals.items():
        flops = 2 * s * s * b * h * d  # half of the scores are masked
        for backward, goal in ((False, forward), (True, both)):
            yield Row(
                f"causal attention {'fwd+bwd' if backward else 'fwd'} s {s} b {b}",
                "attention",
                (s, b, h, d),
                (64, 2, 2, 64),
                {"backward": backward},
                flops=flops * 7 // 2 if backward else flops,
                goal=goal,
            )


def rows() -> list[Row]:
    """Every row, in the table's order."""
    return [*_casts(), *_norms(), *_activations(), *_others(), *_gemms(), *_attention()]
