# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A training step of a layer, forward and backward: how long, how much memory, how long the host is busy.

The convention: gradients of weights and input are set to None before every step, outside the clock, so that a step
writes them and accumulates nothing; there is no optimizer and no loss, the output's gradient is given. FP8 weights are
cast in every step. The device's time of a step lies between two events around it; steps follow one another without
waiting, and the first of a round, which starts on an idle device, is not counted.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import torch

from side_by_side.layers import Layer, Shape
from side_by_side.timing import no_collection, synchronize


@dataclass
class Figures:
    """Of one contestant, in one mode, at one shape; times as medians of rounds."""

    rounds_ms: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    #: GiB beyond what the layer's weights and input take, and with them.
    peak_gib: float | None = None
    total_gib: float | None = None

    @property
    def ms(self) -> float:
        return statistics.median(self.rounds_ms)

    def record(self) -> dict[str, float | None]:
        return {
            "ms": self.ms,
            "fastest_ms": min(self.rounds_ms),
            "slowest_ms": max(self.rounds_ms),
            "host_us": statistics.median(self.host_us),
            "peak_gib": self.peak_gib,
            "total_gib": self.total_gib,
        }


class Trainee:
    """A layer with its input and its output's gradient."""

    def __init__(self, layer: Layer, x: torch.Tensor, dy: torch.Tensor) -> None:
        self.layer, self.x, self.dy = layer, x.detach().clone().requires_grad_(), dy
        self.receivers = [*layer.module.parameters(), self.x]

    def clear(self) -> None:
        for tensor in self.receivers:
            tensor.grad = None

    def step(self) -> torch.Tensor:
        y = self.layer.run(self.x)
        y.backward(self.dy)
        return y

    def warm_up(self, steps: int) -> None:
        """Also makes sure that the outputs and every gradient are finite.

        Raises:
            ArithmeticError: one is not, or a parameter got no gradient.
        """
        for _ in range(steps):
            self.clear()
            y = self.step()
        named = {name: p.grad for name, p in self.layer.module.named_parameters()}
        for name, tensor in {"the output": y, "the input's gradient": self.x.grad, **named}.items():
            if tensor is None:
                raise ArithmeticError(f"{name} has no gradient")
            if not bool(torch.isfinite(tensor).all()):
                raise ArithmeticError(f"{name} is not finite")
        self.clear()


def trainee(layer: Layer, shape: Shape, device: torch.device) -> Trainee:
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.sequence, shape.batch, shape.hidden)
    x, dy = (torch.randn(size, generator=generator, device=device).bfloat16() for _ in range(2))
    return Trainee(layer, x, dy)


def time_round(one: Trainee, steps: int, figures: Figures, device: torch.device) -> None:
    """Append a round's medians."""
    marks, host = [], []
    with no_collection():
        for _ in range(steps + 1):
            one.clear()
            mark = _Mark(device)
            start = time.perf_counter_ns()
            one.step()
            host.append((time.perf_counter_ns() - start) / 1e3)
            mark.end()
            marks.append(mark)
        synchronize(device)
    figures.rounds_ms.append(statistics.median(mark.ms() for mark in marks[1:]))
    figures.host_us.append(statistics.median(host[1:]))
    one.clear()


class _Mark:
    """Around a step, on the device's clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self.events[0].record()
        else:
            self.start = time.perf_counter()

    def end(self) -> None:
        if self.on_gpu:
            self.events[1].record()
        else:
            self.spent = time.perf_counter() - self.start

    def ms(self) -> float:
        return self.events[0].elapsed_time(self.events[1]) if self.on_gpu else self.spent * 1e3


def measure_memory(one: Trainee, figures: Figures, device: torch.device) -> None:
    if device.type != "cuda":
        return
    one.clear()
    synchronize(device)
    own = sum(tensor.numel() * tensor.element_size() for tensor in [*one.receivers, one.dy])
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    one.step()
    synchronize(device)
    beyond = torch.cuda.max_memory_allocated(device) - before
    figures.peak_gib, figures.total_gib = beyond / 2**30, (beyond + own) / 2**30
    one.clear()


def linear_times(linears: dict[str, Trainee], rounds: int, calls: int, device: torch.device) -> dict[str, dict]:
    """Microseconds of the host for a forward and a backward of one small linear layer, by name."""
    found: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in linears}
    with no_collection():
        for _ in range(rounds):
            for name, one in linears.items():
                forward = backward = 0
                for _ in range(calls):
                    one.clear()
                    start = time.perf_counter_ns()
                    y = one.layer.run(one.x)
                    middle = time.perf_counter_ns()
                    y.backward(one.dy)
                    backward += time.perf_counter_ns() - middle
                    forward += middle - start
                synchronize(device)
                found[name]["forward"].append(forward / calls / 1e3)
                found[name]["backward"].append(backward / calls / 1e3)
    medians = {name: {part: statistics.median(each) for part, each in parts.items()} for name, parts in found.items()}
    return {name: {**parts, "us": parts["forward"] + parts["backward"]} for name, parts in medians.items()}
