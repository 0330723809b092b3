# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where a step's time goes: kernels by the device's time, Python functions by the host's."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time

import torch

from side_by_side import report
from side_by_side.timing import synchronize
from side_by_side.training_steps import Trainee

_NAME = 110


def kernels(title: str, one: Trainee, device: torch.device, steps: int = 5, limit: int = 45) -> report.Table:
    """What the device ran in a step, the longest first."""
    kind = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(steps):
            one.clear()
            one.step()
        synchronize(device)
    spent = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = [e for e in profile.key_averages() if getattr(e, spent) > 0]
    events.sort(key=lambda event: -getattr(event, spent))
    total = sum(getattr(event, spent) for event in events) / steps
    rows = [
        [event.key[:_NAME], f"{event.count / steps:g}", f"{us:.1f}", f"{us / total:.1%}"]
        for event in events[:limit]
        for us in [getattr(event, spent) / steps]
    ]
    rest = total - sum(getattr(event, spent) for event in events[:limit]) / steps
    launches = sum(event.count for event in events) / steps
    rows += [["the rest", "", f"{rest:.1f}", f"{rest / total:.1%}"], ["all", f"{launches:g}", f"{total:.1f}", ""]]
    return report.table(f"{title}: kernels of one step", ["kernel", "calls", "us", "share"], rows)


def functions(title: str, one: Trainee, device: torch.device, calls: int = 500, limit: int = 45) -> report.Table:
    """What the host ran in a step, by the time of each function itself. The backward runs in this thread meanwhile,
    because the profiler sees no other; the profiler's own cost falls on whatever is called often."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(20):
            one.clear()
            one.step()
        synchronize(device)
        profiler.enable()
        for _ in range(calls):
            one.clear()
            one.step()
        profiler.disable()
    synchronize(device)
    stats = pstats.Stats(profiler, stream=io.StringIO()).stats  # type: ignore[attr-defined]
    found = sorted(stats.items(), key=lambda item: -item[1][2])
    total = sum(values[2] for values in stats.values())
    rows = [
        [_place(place)[-_NAME:], f"{count / calls:g}", f"{own / calls * 1e6:.2f}", f"{whole / calls * 1e6:.2f}"]
        for place, (_, count, own, whole, _) in found[:limit]
    ]
    rows.append(["all", "", f"{total / calls * 1e6:.1f}", ""])
    return report.table(f"{title}: functions of one step", ["function", "calls", "own us", "with callees us"], rows)


def _place(place: tuple[str, int, str]) -> str:
    file, line, name = place
    return name if file == "~" else f"{'/'.join(file.split('/')[-3:])}:{line} {name}"


def host_us(one: Trainee, device: torch.device, steps: int = 5) -> float:
    """Median host time of a step that starts on an idle device: beside the kernels' sum it says who waits."""
    spent = []
    for _ in range(steps):
        one.clear()
        synchronize(device)
        start = time.perf_counter_ns()
        one.step()
        spent.append((time.perf_counter_ns() - start) / 1e3)
    synchronize(device)
    return statistics.median(spent)
