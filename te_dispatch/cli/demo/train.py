# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""One training run: BF16, or the same with one FP8 recipe switched on. Nothing else differs between two runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import te_dispatch.pytorch as te
from te_dispatch.cli.demo.counting import Observer
from te_dispatch.cli.demo.data import Batches, Corpus
from te_dispatch.cli.demo.model import VOCABULARY, build, fingerprint
from te_dispatch.cli.demo.options import RECIPES, Options
from te_dispatch.core.policy import Policy
from te_dispatch.core.scopes import MANAGER

BF16 = "bf16"

#: Steps in which casts are looked at, at most, evenly spread and the first among them.
WATCHED_STEPS = 10

#: Batches of validation text.
VALIDATION_BATCHES = 8

#: Steps that warm up before the steps that are timed.
WARM_UP = 2

#: Called with (step, losses fetched so far, tokens per second so far) after every `log_every` steps.
Progress = Callable[[int, list[float], float], None]


@dataclass
class Run:
    """What one run gave.

    Attributes:
        name: ``bf16`` or the recipe's.
        losses: mean cross entropy of each step's batch, in nats per byte.
        validation: mean cross entropy on validation text after the last step, None if it did not get there.
        tokens_per_second: of `timed_steps` further steps without an observer; None likewise.
        observed_tokens_per_second: of the training steps proper, in which an observer counts every call.
        initial_weights: fingerprint before the first step.
        watched_steps: steps in which casts were looked at.
        observer: what was counted.
        peak_memory: bytes that PyTorch held at most in the timed steps; None on a CPU.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    validation: float | None = None
    tokens_per_second: float | None = None
    observed_tokens_per_second: float | None = None
    timed_steps: int = 0
    initial_weights: str = ""
    watched_steps: list[int] = field(default_factory=list)
    observer: Observer = field(default_factory=Observer)
    peak_memory: int | None = None


class Trainer:
    """Trains one model; `run` is filled as it goes, so that an interrupted run keeps what it has.

    Args:
        options: checked.
        name: `BF16` or a key of `RECIPES`.
        corpus: text.
    """

    def __init__(self, options: Options, name: str, corpus: Corpus) -> None:
        self.options = options
        self.run = Run(name)
        self.recipe = None if name == BF16 else RECIPES[name]()
        self._device = options.device
        self._train = Batches(corpus.train, options.seq, options.batch, self._device)
        self._validation = Batches(corpus.validation, options.seq, options.batch, self._device)
        self._order = self._train.order(options.steps, options.seed).to(self._device)
        self._model = build(options)
        self.run.initial_weights = fingerprint(self._model)
        self._optimizer = _optimizer(self._model, options)
        self._on_accelerator = self._device.type != "cpu"

    def train(self, progress: Progress | None = None) -> Run:
        """All steps under an observer, then validation, then the timing."""
        options, run, observer = self.options, self.run, self.run.observer
        run.watched_steps = watched(options.steps) if self.recipe is not None else []
        pending: list[torch.Tensor] = []
        try:
            with _observed(observer):
                self._train_observed(pending, progress)
                observer.phase = "validation"
                run.validation = self.validate()
        finally:
            self._fetch(pending)
        # Like the time, the memory of steps that nobody looks into.
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        run.timed_steps, run.tokens_per_second = self.time_steps()
        if self._device.type == "cuda":
            run.peak_memory = torch.cuda.max_memory_allocated(self._device)
        return run

    def _train_observed(self, pending: list[torch.Tensor], progress: Progress | None) -> None:
        options, run = self.options, self.run
        watch = set(run.watched_steps)
        started = time.perf_counter()
        for step in range(options.steps):
            run.observer.watching = step in watch
            pending.append(self.step(step))
            run.observer.watching = False
            if (step + 1) % options.log_every == 0 or step + 1 == options.steps:
                # Reading losses waits for the device, so that it is done where they are shown.
                self._fetch(pending)
                speed = (step + 1) * options.tokens_per_step / (time.perf_counter() - started)
                run.observed_tokens_per_second = speed
                if progress is not None:
                    progress(step + 1, run.losses, speed)

    def _fetch(self, pending: list[torch.Tensor]) -> None:
        if pending:
            self.run.losses += torch.stack(pending).tolist()
            pending.clear()

    def step(self, number: int) -> torch.Tensor:
        """One optimizer step on the batch of that number; the loss stays on the device."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(number, self.options.steps, self.options.lr)
        x, y = self._train.at(self._order[number % self.options.steps])
        loss = self._loss(x, y)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return loss.detach()

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with (
            torch.autocast(self._device.type, torch.bfloat16),
            te.autocast(self.recipe is not None, recipe=self.recipe),
        ):
            logits = self._model(x)
        return torch.nn.functional.cross_entropy(logits.float().view(-1, VOCABULARY), y.reshape(-1))

    def validate(self) -> float:
        """Mean cross entropy on evenly spaced windows of the validation text, computed as in training."""
        with torch.no_grad():
            losses = [self._loss(*self._validation.at(s)) for s in self._validation.spread(VALIDATION_BATCHES)]
        return float(torch.stack(losses).mean())

    def time_steps(self) -> tuple[int, float]:
        """(steps, tokens per second) of further steps that nobody observes.

        They train on, so that they do all that a step does; curves and validation are complete by then.
        """
        count = max(3, min(50, self.options.steps // 10))
        for number in range(WARM_UP):
            self.step(number)
        self._wait()
        started = time.perf_counter()
        for number in range(count):
            self.step(number)
        self._wait()
        return count, count * self.options.tokens_per_step / (time.perf_counter() - started)

    def _wait(self) -> None:
        if self._on_accelerator:
            torch.accelerator.synchronize(self._device)


@contextmanager
def _observed(observer: Observer) -> Iterator[None]:
    """`te_dispatch.observe`, with one scope for the whole run."""
    with MANAGER.reenter(MANAGER.scope(Policy(name="observed"), observer)):
        yield


def fastest_threads() -> int:
    """PyTorch's own number of threads, or 1 where that is faster: on busy cores threads wait for each other for longer
    than the small matrices of a demo take to multiply."""
    usual = torch.get_num_threads()
    a, b = torch.ones(1024, 128), torch.ones(128, 512)
    best = {}
    for count in (usual, 1):
        torch.set_num_threads(count)
        times = []
        for _ in range(20):
            started = time.perf_counter()
            torch.mm(a, b).sqrt_()
            times.append(time.perf_counter() - started)
        best[count] = sorted(times)[len(times) // 2]
    torch.set_num_threads(usual)
    return usual if best[usual] <= best[1] else 1


def watched(steps: int) -> list[int]:
    """Steps in which casts are looked at: the first, the last, and evenly spread ones between."""
    count = min(WATCHED_STEPS, steps)
    return sorted({round(i * (steps - 1) / max(1, count - 1)) for i in range(count)})


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth (at most 100 steps), then a half cosine down to a tenth of the peak."""
    warm_up = max(1, min(100, steps // 10))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))


def _optimizer(model: torch.nn.Module, options: Options) -> torch.optim.Optimizer:
    """AdamW; norms, biases and embeddings do not decay."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "tokens" not in n and "positions" not in n]
    chosen = {id(p) for p in matrices}
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if id(p) not in chosen], "weight_decay": 0.0},
    ]
    fused = options.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=fused or None)
