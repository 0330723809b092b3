# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The picture: curves of all runs above, their differences from BF16 below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from te_dispatch.cli.demo.report import smoothed
from te_dispatch.cli.demo.train import BF16

_COLOURS = {BF16: "#33373d", "delayed": "#d9541e", "current": "#1f77b4", "block": "#2a9d4a"}
_LABELS = {
    BF16: "BF16",
    "delayed": "FP8 delayed scaling",
    "current": "FP8 current scaling",
    "block": "FP8 block scaling",
}


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw a complete document (`report.document`) to a PNG."""
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(9, 6.4), sharex=True, height_ratios=(2.4, 1), layout="constrained"
        )
        try:
            _draw_curves(above, data)
            _draw_gaps(below, data)
            figure.suptitle(_title(data), fontsize=12, x=0.01, ha="left")
            figure.savefig(path, dpi=150)
        finally:
            plt.close(figure)


def _losses(run: dict[str, Any]) -> list[float]:
    return [float("nan") if loss is None else loss for loss in run["losses"]]


def _title(data: dict[str, Any]) -> str:
    arguments = data["arguments"]
    shape = (
        f"{arguments['layers']} layers of {arguments['hidden']}, {arguments['batch']}x{arguments['seq']} bytes a step"
    )
    return f"Byte-level GPT, {shape}, on {data['device']['vendor']} {data['device']['arch']}".replace(
        "cpu cpu", "a CPU"
    )


def _draw_curves(axes: Axes, data: dict[str, Any]) -> None:
    over = data["method"]["smoothing_span"]
    for run in data["runs"]:
        losses, colour = _losses(run), _COLOURS[run["name"]]
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, color=colour, alpha=0.22, linewidth=0.8)
        validation = run["validation_loss"]
        end = "" if validation is None else f", validation {validation:.3f}"
        dashed = "-" if run["name"] == BF16 else (0, (5, 1.5))
        axes.plot(steps, smoothed(losses, over), color=colour, linewidth=1.8, linestyle=dashed,
                  label=_LABELS[run["name"]] + end)  # fmt: skip
    axes.set_ylabel("training loss, nats per byte")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _draw_gaps(axes: Axes, data: dict[str, Any]) -> None:
    over = data["method"]["smoothing_span"]
    reference = smoothed(_losses(data["runs"][0]), over)
    axes.axhline(0, color=_COLOURS[BF16], linewidth=1)
    for position, run in enumerate(data["runs"][1:]):
        difference = [a - b for a, b in zip(smoothed(_losses(run), over), reference)]
        colour = _COLOURS[run["name"]]
        axes.plot(range(1, len(difference) + 1), difference, color=colour, linewidth=1.5)
        gap = run["gap_to_bf16"]
        if gap is None:
            continue
        axes.plot([gap["step"]], [gap["nats"]], "o", color=colour, markersize=5)
        relative = "" if gap["relative"] is None else f" ({gap['relative']:+.2%})"
        # In a column beside the curves, where no curve can run through it.
        axes.annotate(
            f"{run['name']}: {gap['nats']:+.4f}{relative}, step {gap['step']}", (0.99, 0.97 - 0.13 * position),
            xycoords="axes fraction", ha="right", va="top", color=colour, fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
        )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("difference to BF16, nats")
    axes.margins(y=0.35)
    axes.grid(alpha=0.25)
