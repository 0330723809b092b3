# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the runs say together: gaps between curves, the document that is saved, and the tables on the screen."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import te_dispatch
from te_dispatch.cli.demo.data import Corpus
from te_dispatch.cli.demo.options import Options
from te_dispatch.cli.demo.train import BF16, VALIDATION_BATCHES, WARM_UP, Run
from te_dispatch.core.probing import plain
from te_dispatch.core.scopes import MANAGER

FORMAT = 1


def span(steps: int) -> int:
    """How many steps the smoothing of curves averages over, in effect: a twentieth of the run, at least 5."""
    return max(5, steps // 20)


def smoothed(losses: Sequence[float], over: int) -> list[float]:
    """Exponential moving average with weight 2 / (over + 1) for the newest value, corrected for its start at zero."""
    weight = 2 / (over + 1)
    average, total, found = 0.0, 0.0, []
    for loss in losses:
        average += weight * (loss - average)
        total += weight * (1 - total)
        found.append(average / total)
    return found


def largest_gap(losses: Sequence[float], reference: Sequence[float], over: int) -> dict[str, Any] | None:
    """Where two smoothed curves are furthest apart, from step `over` on (before it they have barely begun to average).

    Returns:
        step (counted from 1), nats (signed: positive where `losses` is worse), relative (to the reference's smoothed
        value there); None where there is nothing finite to compare.
    """
    pairs = list(zip(smoothed(losses, over), smoothed(reference, over)))
    start = min(over, len(pairs)) - 1
    gaps = [(abs(a - b), i) for i, (a, b) in enumerate(pairs) if i >= start and math.isfinite(a - b)]
    if not gaps:
        return None
    at = max(gaps, key=lambda gap: (gap[0], -gap[1]))[1]
    ours, theirs = pairs[at]
    return {"step": at + 1, "nats": ours - theirs, "relative": (ours - theirs) / theirs if theirs else None}


def document(options: Options, corpus: Corpus, runs: Sequence[Run], plan_digest: str | None) -> dict[str, Any]:
    """Everything, as plain data for JSON."""
    over = span(options.steps)
    reference = next((run for run in runs if run.name == BF16), None)
    complete = len(runs) == 1 + len(options.recipes) and all(run.tokens_per_second is not None for run in runs)
    device = MANAGER.device_facts(options.device)
    policy = MANAGER.capture().policy
    return {
        "format": FORMAT,
        "complete": complete,
        "arguments": options.as_data(),
        "versions": {
            "te_dispatch": te_dispatch.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "backends": {b.distribution: b.version for b in MANAGER.snapshot.backends.values()},
        },
        "device": {name: plain(device[name]) for name in device},
        "cpu_threads": torch.get_num_threads(),
        "policy": {"name": policy.name, "digest": policy.digest(), "content": policy.as_data()},
        "plan_digest": plan_digest,
        "corpus": corpus.as_data(),
        "method": {
            "smoothing": f"exponential moving average, weight 2/({over}+1), bias-corrected",
            "smoothing_span": over,
            "gap": f"largest absolute difference of the smoothed training curves from step {over} on",
            "calls": "every operator call of the training steps, and apart from them of validation",
            "tokens_per_second": f"further steps without an observer, after {WARM_UP} that warm up",
            "casts": "values cast in watched_steps only; saturated: beyond the largest finite value after scaling; "
            "underflowed: not zero before the cast, zero after it",
            "validation_batches": VALIDATION_BATCHES,
        },
        "runs": [_run(run, reference, over) for run in runs],
    }


def _run(run: Run, reference: Run | None, over: int) -> dict[str, Any]:
    return {
        "name": run.name,
        "steps_done": len(run.losses),
        "losses": [_finite(loss) for loss in run.losses],
        "final_train_loss": _finite(smoothed(run.losses, over)[-1]) if run.losses else None,
        "validation_loss": None if run.validation is None else _finite(run.validation),
        "gap_to_bf16": None if reference in (None, run) else largest_gap(run.losses, reference.losses, over),
        "tokens_per_second": run.tokens_per_second,
        "timed_steps": run.timed_steps,
        "observed_tokens_per_second": run.observed_tokens_per_second,
        "initial_weights": run.initial_weights,
        "peak_memory_bytes": run.peak_memory,
        "watched_steps": [step + 1 for step in run.watched_steps],
        "casts": run.observer.casts(),
        "calls": run.observer.table(),
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN: a loss that diverged is null."""
    return value if math.isfinite(value) else None


# -- for people ------------------------------------------------------------------------------------------------------


def show(data: dict[str, Any], console: Console) -> None:
    """Print the summary, what ran, and what the casts lost."""
    _show_summary(data, console)
    _show_calls(data, console)
    if any(run["casts"] for run in data["runs"]):
        _show_casts(data, console)
    console.print(Text(f"policy {data['policy']['name']}, plan {(data['plan_digest'] or 'none')[:16]}", "dim"))


def _show_summary(data: dict[str, Any], console: Console) -> None:
    table = Table(title="Losses in nats per byte", title_justify="left")
    for name in ("run", "train", "validation", "largest gap to bf16", "tokens/s", "while observed"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for run in data["runs"]:
        gap = run["gap_to_bf16"]
        relative = "" if gap is None or gap["relative"] is None else f" ({gap['relative']:+.2%})"
        told = "" if gap is None else f"{gap['nats']:+.4f}{relative} at step {gap['step']}"
        table.add_row(
            run["name"],
            _number(run["final_train_loss"]),
            _number(run["validation_loss"]),
            told,
            _number(run["tokens_per_second"], ",.0f"),
            _number(run["observed_tokens_per_second"], ",.0f"),
        )
    console.print(table)


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def _show_calls(data: dict[str, Any], console: Console) -> None:
    table = Table(title="Calls of the training steps", title_justify="left")
    table.add_column("operator", style="bold")
    table.add_column("implementation")
    names = [run["name"] for run in data["runs"]]
    for name in names:
        table.add_column(name, justify="right")
    counts: dict[tuple[str, str, str], dict[str, int]] = {}
    for run in data["runs"]:
        for row in run["calls"]:
            pieces = f" ({' + '.join(row['pieces'])})" if row["pieces"] else ""
            counts.setdefault((row["operator"], row["implementation"], pieces), {})[run["name"]] = row["calls"]
    for (operator, implementation, pieces), by_run in sorted(counts.items()):
        table.add_row(operator, implementation + pieces, *(f"{by_run.get(name, 0):,}" for name in names))
    console.print(table)


def _show_casts(data: dict[str, Any], console: Console) -> None:
    steps = max(len(run["watched_steps"]) for run in data["runs"])
    table = Table(title=f"Casts to FP8, looked at in {steps} steps", title_justify="left")
    for name in ("run", "role", "values", "saturated", "became zero"):
        table.add_column(name, justify="left" if name in ("run", "role") else "right")
    for run in data["runs"]:
        for role, counts in run["casts"].items():
            values = counts["values"]
            shown = (f"{counts[name]:,} ({counts[name] / values:.4%})" for name in ("saturated", "underflowed"))
            table.add_row(run["name"], role, f"{values:,}", *shown)
    console.print(table)
