# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Training text that every machine has: the source files of the running Python's standard library, as bytes."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from te_dispatch.cli.console import CommandError

#: Folders that are not the library's own source, or are tests.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}

#: Every so manieth file is for validation.
_VALIDATION_EVERY = 10

_SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Bytes to train and to validate on.

    Attributes:
        train, validation: uint8 (n,), on the host.
        files: how many files there are in each.
        digest: of both, so that two runs can be told to have read the same.
    """

    train: torch.Tensor
    validation: torch.Tensor
    files: tuple[int, int]
    digest: str

    def as_data(self) -> dict[str, Any]:
        return {
            "source": f"standard library of Python {platform.python_version()}",
            "train_bytes": self.train.numel(),
            "validation_bytes": self.validation.numel(),
            "train_files": self.files[0],
            "validation_files": self.files[1],
            "sha256": self.digest,
        }


def standard_library(root: Path | None = None) -> Corpus:
    """Read the source files below `root` (None: the standard library), in the order of their names.

    Whole files go to validation, every tenth, so that no text is on both sides.

    Raises:
        CommandError: there are too few files, as in a Python whose library is an archive.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    # By parts and not by text: the separator must not take part in the order.
    paths = sorted((p for p in root.rglob("*.py") if _wanted(p, root)), key=lambda p: p.relative_to(root).parts)
    read = 0
    for path in paths:
        try:
            text = path.read_bytes()
        except OSError:
            continue
        read += 1
        parts[1 if read % _VALIDATION_EVERY == 0 else 0].append(text)
    if not parts[1]:
        raise CommandError(f"{root}: {read} readable Python source files, expected at least {_VALIDATION_EVERY}")
    texts = [_SEPARATOR.join(part) for part in parts]
    digest = hashlib.sha256(b"".join(texts)).hexdigest()
    train, validation = (torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()) for text in texts)
    return Corpus(train, validation, (len(parts[0]), len(parts[1])), digest)


def _wanted(path: Path, root: Path) -> bool:
    return not _SKIPPED.intersection(path.relative_to(root).parts[:-1])


class Batches:
    """Windows of a text: x (batch, seq) and y, x moved on by one byte, both int64 on `device`.

    Raises:
        CommandError: the text is shorter than one window.
    """

    def __init__(self, text: torch.Tensor, seq: int, batch: int, device: torch.device) -> None:
        if text.numel() < seq + 1:
            raise CommandError(f"--seq {seq}: expected less than the {text.numel()} bytes of text")
        self._text = text.to(device)
        self._reach = torch.arange(seq + 1, device=device)
        self._last = text.numel() - seq - 1
        self._batch = batch

    def order(self, steps: int, seed: int) -> torch.Tensor:
        """Where the windows of `steps` random batches start: int64 (steps, batch) on the host; by the seed alone."""
        return torch.randint(self._last + 1, (steps, self._batch), generator=torch.Generator().manual_seed(seed))

    def spread(self, count: int) -> torch.Tensor:
        """`count` batches of evenly spaced windows, the same for every run."""
        return torch.linspace(0, self._last, count * self._batch).long().view(count, self._batch)

    def at(self, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of windows that start at `starts` (batch,)."""
        windows = self._text[starts.to(self._text.device)[:, None] + self._reach].long()
        return windows[:, :-1], windows[:, 1:]
