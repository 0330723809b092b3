# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the demo is asked to do, checked before anything runs or is written."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from te_dispatch.cli.console import CommandError
from te_dispatch.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from te_dispatch.core.policy.known import did_you_mean

#: What ``--recipe`` takes, each with the library's defaults.
RECIPES: dict[str, type[Recipe]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
ALL = "all"

#: FP8 GEMMs take dimensions in multiples of this.
ALIGNMENT = 16


@dataclass(frozen=True)
class Size:
    """Shape of the model and of a step, with a length and a learning rate that suit it."""

    hidden: int
    layers: int
    heads: int
    seq: int
    batch: int
    steps: int
    lr: float


SIZES = {
    "tiny": Size(hidden=128, layers=2, heads=4, seq=128, batch=8, steps=200, lr=3e-3),
    "small": Size(hidden=384, layers=6, heads=6, seq=256, batch=16, steps=500, lr=1e-3),
    "medium": Size(hidden=1024, layers=12, heads=16, seq=1024, batch=8, steps=500, lr=6e-4),
    "large": Size(hidden=4096, layers=8, heads=32, seq=2048, batch=8, steps=200, lr=2e-4),
}


@dataclass(frozen=True)
class Options:
    """A checked request.

    Attributes:
        recipes: FP8 recipes to train with, by name, beside BF16.
        hidden, layers, heads, seq, batch: the model, and a step's sequences of `seq` bytes.
        steps: of each run. lr: peak learning rate. seed: of weights and data order.
        device: where to train. policy: put in force for all runs, None for what is in force anyway.
        out: folder of the JSON and the PNG.
        log_every: steps between progress updates.
    """

    recipes: tuple[str, ...]
    hidden: int
    layers: int
    heads: int
    seq: int
    batch: int
    steps: int
    lr: float
    seed: int
    device: torch.device
    policy: str | None = None
    out: Path = Path(".")
    log_every: int = 10

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "recipes": list(self.recipes), "device": str(self.device), "out": str(self.out)}

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq


def read_options(arguments: Mapping[str, Any]) -> Options:
    """Check the command's arguments, all but the folder (`check_folder`).

    Raises:
        CommandError: names the argument, what came and what was expected.
    """
    device = _device(arguments.get("device"))
    name = arguments.get("size") or ("tiny" if device.type == "cpu" else "medium")
    if name not in SIZES:
        raise CommandError(f"--size {name}: expected {', '.join(SIZES)}{did_you_mean(name, SIZES, listing=False)}")
    numbers = asdict(SIZES[name]) | {k: arguments[k] for k in asdict(SIZES[name]) if arguments.get(k) is not None}
    options = Options(
        recipes=_recipes(arguments.get("recipe")),
        **numbers,
        seed=arguments.get("seed", 0),
        device=device,
        policy=arguments.get("policy"),
        out=Path(arguments.get("out") or "."),
        log_every=arguments.get("log_every", 10),
    )
    check_numbers(options)
    return options


def check_numbers(options: Options) -> None:
    """Raise a CommandError for a shape that cannot be trained."""
    for name in ("hidden", "layers", "heads", "seq", "batch", "steps", "log_every"):
        if getattr(options, name) < 1:
            raise CommandError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected at least 1")
    for name in ("hidden", "seq"):
        if getattr(options, name) % ALIGNMENT:
            raise CommandError(
                f"--{name} {getattr(options, name)}: expected a multiple of {ALIGNMENT}, as FP8 GEMMs need"
            )
    if options.hidden % options.heads:
        raise CommandError(f"--heads {options.heads}: expected a divisor of --hidden {options.hidden}")
    if not (math.isfinite(options.lr) and options.lr > 0):
        raise CommandError(f"--lr {options.lr}: expected a positive number")
    if not 0 <= options.seed < 2**31:
        raise CommandError(f"--seed {options.seed}: expected 0 to 2147483647")


def _recipes(given: Sequence[str] | None) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for text in given or ("delayed",):
        for name in filter(None, (part.strip() for part in text.split(","))):
            if name == ALL:
                names |= dict.fromkeys(RECIPES)
            elif name in RECIPES:
                names[name] = None
            else:
                hint = did_you_mean(name, [*RECIPES, ALL], listing=False)
                raise CommandError(f"--recipe {name}: expected {', '.join(RECIPES)} or {ALL}{hint}")
    if not names:
        raise CommandError(f"--recipe {','.join(given or ())!r}: expected {', '.join(RECIPES)} or {ALL}")
    return tuple(names)


def _device(text: str | None) -> torch.device:
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if text is None:
        return current or torch.device("cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise CommandError(f"--device {text}: expected a PyTorch device such as cpu, cuda or cuda:0") from None
    if device.type == "cpu":
        return device
    if current is None:
        raise CommandError(f"--device {text}: PyTorch sees no accelerator here; expected cpu")
    count = torch.accelerator.device_count()
    if device.type != current.type or (device.index or 0) >= count:
        raise CommandError(f"--device {text}: expected cpu or {current.type}:0 to {current.type}:{count - 1}")
    return device


def check_folder(folder: Path) -> None:
    """Create the folder for the results; call it when all else is in order.

    Raises:
        CommandError: it cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Asking for permission bits answers wrongly for root and on network disks; a nameless file leaves nothing.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(f"--out {folder}: cannot be written to: {error.strerror or error}") from None
