# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A transformer layer's training step, forward and backward: this project, Transformer Engine, PyTorch, side by side.

Shapes A, A2 and S of the design; bf16, and FP8 with delayed, current and block scaling. All contestants of a shape run
in one process, in interleaved rounds; figures are medians. Beside the time: a step's peak memory, the host's time, and
the host's time of one small Linear. Where there is a GPU, ``te_dispatch, graphed`` is the layer as a CUDA graph. What
counts as a step: `side_by_side/training_steps.py`.

    python benchmarks/layer.py [--shapes A,S] [--modes delayed] [--contestants 'te_dispatch;torch*'] [--json FILE]
    python benchmarks/layer.py --profile --shapes A --modes delayed      kernels of a step
    python benchmarks/layer.py --host-profile linear --modes delayed     Python functions of a step

A goal is a ratio within this run (`side_by_side/targets.py`).
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import sys
import time
from typing import Any

import torch
from side_by_side import layers, machine, profiles, report, targets, te_environment, timing, training_steps
from side_by_side.layers import QUICK, SHAPES, Contestant, Shape
from side_by_side.training_steps import Figures, Trainee

SUBJECT = "te_dispatch"
#: Features of the small linear layer, and the rows of its input.
LINEAR_FEATURES, LINEAR_ROWS = 768, 512


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of " + ", ".join(SHAPES))
    parser.add_argument("--modes", default=",".join(layers.MODES), help="of " + ", ".join(layers.MODES))
    parser.add_argument(
        "--contestants", help="names, globs, separated by ';'; default: all but 'te_dispatch, compiled'"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dropout", type=float, default=0.0, help="of the hidden states and of attention")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, 2 rounds: whether it runs, not how fast")
    parser.add_argument("--profile", action="store_true", help="kernels of a step instead of times")
    parser.add_argument("--host-profile", choices=("linear", "layer"), help="Python functions of its step instead")
    parser.add_argument("--te", help="a folder that holds Transformer Engine, to be used from there")
    parser.add_argument("--commit", help="for the record, where there is no repository")
    parser.add_argument("--json", help="also write the record here")
    parser.add_argument("--markdown", help="also write the tables here")
    options = parser.parse_args(argv)
    for name, known in (("shapes", SHAPES), ("modes", layers.MODES)):
        asked = getattr(options, name).split(",")
        if unknown := [each for each in asked if each not in known]:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; there are {', '.join(known)}")
        setattr(options, name, asked)
    options.chosen = chosen(options.contestants)
    if not options.chosen:
        names = "; ".join(each.name for each in layers.contestants())
        parser.error(f"--contestants: none matches {options.contestants}; there are {names}")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    if not 0.0 <= options.dropout < 1.0:
        parser.error("--dropout: from 0, below 1")
    try:
        options.device = torch.empty(1, device=options.device).device
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device: {timing.why(error)}")
    try:
        if options.te is not None:
            te_environment.site_of(options.te)
    except FileNotFoundError as error:
        parser.error(str(error))
    if options.quick:
        options.rounds = 2
    return options


def chosen(patterns: str | None) -> list[Contestant]:
    if patterns is None:
        return [each for each in layers.contestants() if each.default]
    return [each for each in layers.contestants() if any(fnmatch.fnmatch(each.name, p) for p in patterns.split(";"))]


def progress(text: str) -> None:
    print(f"[{time.monotonic() - _START:.0f} s] {text}", file=sys.stderr)


_START = time.monotonic()


def field(shape: Shape, options: argparse.Namespace) -> tuple[dict[tuple[str, str], Trainee], dict[str, str]]:
    """Warm trainees by (contestant, mode), and why others have none."""
    trainees, refused = {}, {}
    for contestant in options.chosen:
        if contestant.missing():
            continue
        for mode in (mode for mode in options.modes if mode in contestant.modes):
            progress(f"warming up {contestant.name}, {mode}")
            try:
                layer = contestant.layer(shape, mode, options.device, options.dropout)
                one = training_steps.trainee(layer, shape, options.device)
                one.warm_up(2 if options.quick else 5)
                trainees[contestant.name, mode] = one
            except Exception as error:
                refused[f"{contestant.name}, {mode}"] = timing.why(error)
    return trainees, refused


def measure(shape: Shape, options: argparse.Namespace) -> tuple[dict[tuple[str, str], Figures], dict[str, str]]:
    trainees, refused = field(shape, options)
    found = {key: Figures() for key in trainees}
    for key, one in trainees.items():
        training_steps.measure_memory(one, found[key], options.device)
    # About a quarter of a second a round and contestant, so that a small layer's rounds are not all noise.
    steps = 2 if options.quick else 4 if shape.hidden > 1024 else 25
    keys = list(trainees)
    for number in range(options.rounds):
        progress(f"round {number + 1} of {options.rounds}")
        for key in keys[number % len(keys) :] + keys[: number % len(keys)] if keys else []:
            training_steps.time_round(trainees[key], steps, found[key], options.device)
    return found, refused


def linear_shape(quick: bool) -> Shape:
    features = QUICK.hidden if quick else LINEAR_FEATURES
    return Shape(features, features, 1, 32 if quick else LINEAR_ROWS, 1)


def linears(options: argparse.Namespace) -> tuple[dict[str, Trainee], dict[str, str]]:
    """One small Linear of every contestant that has one, in the modes asked for; PyTorch's is always there."""
    trainees, refused, shape = {}, {}, linear_shape(options.quick)
    for contestant in options.chosen:
        if contestant.linear is None or contestant.missing():
            continue
        modes = [mode for mode in contestant.modes if mode in options.modes] or list(contestant.modes)
        for mode in modes:
            name = "torch.nn.Linear" if len(contestant.modes) == 1 else f"{contestant.name}, {mode}"
            try:
                layer = contestant.linear(shape.hidden, mode, options.device)
                trainees[name] = training_steps.trainee(layer, shape, options.device)
                trainees[name].warm_up(20)
            except Exception as error:
                refused[f"Linear of {name}"] = timing.why(error)
    return trainees, refused


def time_rows(shape: str, found: dict[tuple[str, str], Figures]) -> list[list[str]]:
    measured = {key: figures.ms for key, figures in found.items()}
    rows = []
    for (name, mode), figures in found.items():
        row = [f"{name}, {mode}", f"{figures.ms:.2f}", f"{min(figures.rounds_ms):.2f}-{max(figures.rounds_ms):.2f}"]
        rival = measured.get(("transformer_engine", mode))
        row.append(f"{figures.ms / rival:.3f}" if rival else "-")
        row.append(f"{sorted(figures.host_us)[len(figures.host_us) // 2]:.0f}")
        row += ["-", "-"] if figures.peak_gib is None else [f"{figures.peak_gib:.2f}", f"{figures.total_gib:.2f}"]
        goals = {
            SUBJECT: targets.layer_goal,
            targets.TRITON: targets.triton_goal,
            targets.GRAPHED: targets.graphed_goal,
        }
        goal = goals[name](shape, mode, measured) if name in goals else None
        row += [f"{goal.ms:.2f} = {goal.source}", report.verdict(figures.ms, goal.ms)] if goal else ["-", "-"]
        if shape == "A" and name == SUBJECT and mode != "bf16" and figures.peak_gib is not None:
            row[-1] += f"; memory {report.verdict(figures.peak_gib, targets.PEAK_GIB)}"
        rows.append(row)
    return rows


TIME_COLUMNS = ["layer", "ms", "rounds", "x TE", "host us", "peak GiB", "with weights", "goal ms", "verdict"]


def linear_rows(times: dict[str, dict[str, float]]) -> list[list[str]]:
    plain = times.get("torch.nn.Linear", {}).get("us")
    rows = []
    for name, each in times.items():
        row = [name, *(f"{each[part]:.1f}" for part in ("forward", "backward", "us"))]
        row.append(f"{each['us'] / plain:.2f}" if plain else "-")
        judged = plain is not None and name.startswith(SUBJECT) and not name.startswith(targets.TRITON)
        row.append(report.verdict(each["us"], targets.LINEAR_RATIO * plain) if judged else "-")  # type: ignore[operator]
        rows.append(row)
    return rows


def timed(options: argparse.Namespace, record: dict[str, Any]) -> None:
    for name in options.shapes:
        shape = QUICK if options.quick else SHAPES[name]
        progress(f"shape {name}: {shape}")
        found, refused = measure(shape, options)
        record["results"].append(
            {
                "shape": name,
                "sizes": str(shape),
                "layers": {f"{who}, {mode}": figures.record() for (who, mode), figures in found.items()},
                "refused": refused,
            }
        )
        add(record, report.table(f"Shape {name}: {shape}", TIME_COLUMNS, time_rows(name, found)))
        note(record, {f"shape {name}, {who}": reason for who, reason in refused.items()})
        _free(options.device)
    progress("one small Linear")
    trainees, refused = linears(options)
    times = training_steps.linear_times(
        trainees, 3 if options.quick else 9, 10 if options.quick else 150, options.device
    )
    record["results"].append({"linear": times, "refused": refused})
    note(record, refused)
    shape = linear_shape(options.quick)
    title = f"Host time of one Linear, {shape.sequence} x {shape.hidden} -> {shape.hidden}, us"
    goal = f"goal {targets.LINEAR_RATIO:.2f}x"
    columns = ["linear", "forward", "backward", "both", "x torch.nn.Linear", goal]
    add(record, report.table(title, columns, linear_rows(times)))


def profiled(options: argparse.Namespace, record: dict[str, Any]) -> None:
    for name in options.shapes:
        trainees, refused = field(QUICK if options.quick else SHAPES[name], options)
        note(record, {f"shape {name}, {who}": reason for who, reason in refused.items()})
        for (who, mode), one in trainees.items():
            host, figures = profiles.host_us(one, options.device), Figures()
            training_steps.time_round(one, 5, figures, options.device)
            title = f"Shape {name}, {who}, {mode} (a step {figures.ms:.2f} ms, its host time {host:.0f} us)"
            add(record, profiles.kernels(title, one, options.device))
        del trainees
        _free(options.device)


def host_profiled(options: argparse.Namespace, record: dict[str, Any]) -> None:
    calls = 20 if options.quick else 500
    if options.host_profile == "linear":
        trainees, refused = linears(options)
        note(record, refused)
        for name, one in trainees.items():
            add(record, profiles.functions(f"Linear of {name}", one, options.device, calls))
        return
    for name in options.shapes:
        layers_found, refused = field(QUICK if options.quick else SHAPES[name], options)
        note(record, refused)
        for (who, mode), one in layers_found.items():
            title = f"Shape {name}, {who}, {mode}"
            add(record, profiles.functions(title, one, options.device, calls // 5))


def add(record: dict[str, Any], table: report.Table) -> None:
    """To the record, and shown at once: a run of minutes may be ended before it is over."""
    record["tables"].append(table)
    report.show_table(table)


def note(record: dict[str, Any], refused: dict[str, str]) -> None:
    lines = [f"{who} refused: {reason}" for who, reason in refused.items()]
    record["notes"] += lines
    print("\n".join(lines), end="\n" if lines else "")


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    te_environment.enter(options.te)
    report.heed_termination()
    record: dict[str, Any] = {
        "benchmark": "transformer layer",
        "machine": machine.facts(options.commit, options.device),
        "rivals": {each.name: each.missing() for each in options.chosen},
        "rounds": options.rounds,
        "quick": options.quick,
        "dropout": options.dropout,
        "results": [],
        "tables": [],
        "notes": [],
    }
    work = profiled if options.profile else host_profiled if options.host_profile else timed
    report.show_head(record)
    try:
        work(options, record)
    finally:
        # Whatever ends the run, what was found before is kept.
        if options.json:
            report.save(record, options.json)
        if options.markdown:
            with open(options.markdown, "w", encoding="utf-8") as file:
                file.write(report.markdown(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
