# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What one sees while it trains, on standard error: a live line per run on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from te_dispatch.cli.console import err
from te_dispatch.cli.demo.data import Corpus
from te_dispatch.cli.demo.options import Options
from te_dispatch.cli.demo.report import smoothed, span
from te_dispatch.cli.demo.train import Progress
from te_dispatch.core.policy import Policy


class Display:
    """Progress of all runs; nothing at all if `quiet`."""

    def __init__(self, options: Options, quiet: bool) -> None:
        self._options = options
        self._quiet = quiet
        self._console = err()

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=True)

    def header(self, corpus: Corpus, policy: Policy) -> None:
        """What is about to happen."""
        o = self._options
        files, size = sum(corpus.files), f"{corpus.train.numel():,}"
        self.say(
            f"byte-level GPT, {o.layers} layers of {o.hidden} with {o.heads} heads, {o.batch}x{o.seq} bytes a step, "
            f"{o.steps} steps on {o.device}, policy {policy.name}\n"
            f"{files} files of Python's standard library: {size} bytes to train on, "
            f"{corpus.validation.numel():,} to validate"
        )

    @contextmanager
    def progress(self, name: str) -> Iterator[Progress | None]:
        """A callback for one run."""
        if self._quiet:
            yield None
        elif self._console.is_terminal:
            with self._bar() as bar:
                task = bar.add_task(name, total=self._options.steps, loss="", speed="")

                def update(step: int, losses: list[float], speed: float) -> None:
                    loss = smoothed(losses, span(self._options.steps))[-1]
                    bar.update(task, completed=step, loss=f"loss {loss:.4f}", speed=f"{speed:,.0f} tokens/s")

                yield update
        else:

            def line(step: int, losses: list[float], speed: float) -> None:
                loss = smoothed(losses, span(self._options.steps))[-1]
                left = (self._options.steps - step) * self._options.tokens_per_step / speed
                self.say(
                    f"{name:<8} step {step:>5}/{self._options.steps}  "
                    f"loss {loss:.4f}  {speed:,.0f} tokens/s  {left:.0f} s left"
                )

            yield line

    def _bar(self) -> Bar:
        columns = (
            TextColumn("{task.description:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
        )
        return Bar(*columns, console=self._console)
