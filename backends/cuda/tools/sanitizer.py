# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""One process of conformance units under compute-sanitizer, and what its log says. `sanitize.py` runs many."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: What the mangled names of this backend's kernels have in common, and no library's: all are in namespace ted.
NAMESPACE = "_ZN3ted"
#: Seconds beside a unit's limit for Python, torch and the device to start under the tool.
START_S = 90.0
_POLL_S = 0.1
_PREFIX = re.compile(r"=========\s?")
_HAZARD = re.compile(
    r"(error|warning|info): .*(race reported|hazard detected)|(potential )?invalid |misaligned |barrier error|"
    r"malloc/free",
    re.IGNORECASE,
)
_SUMMARY = re.compile(r"(RACECHECK|ERROR) SUMMARY: ")
#: Headings, and errors of CUDA calls: whether those matter, the unit's own result says.
_HARMLESS = re.compile(r"COMPUTE-SANITIZER|Target application returned an error|Program hit ")
_OFFSETS = re.compile(r"\+0x[0-9a-f]+| \[\d+ hazards?\]")
_LIBRARY = "library: "


@dataclass(frozen=True)
class Tool:
    """compute-sanitizer, set up.

    Attributes:
        name: racecheck or memcheck.
        program: its path.
        limit_s: seconds without a unit's end before a process counts as hung.
    """

    name: str
    program: str = "compute-sanitizer"
    limit_s: float = 60.0

    def version(self) -> str:
        """As it says it, in one line."""
        done = subprocess.run([self.program, "--version"], capture_output=True, text=True, check=False)
        return done.stdout.strip().rpartition("\n")[2]

    def command(self, log: Path, slot: int, blocking: bool) -> list[str]:
        """The command line up to the program that it watches.

        Args:
            log: what the tool writes.
            slot: which of the processes at once this is: each has ports of its own, in each run of `sanitize.py`.
            blocking: every launch waits for its kernel.
        """
        command = [self.program, "--tool", self.name, "--log-file", str(log), "--launch-timeout", "300"]
        # Not the host's frames: to collect Python's the tool needs the interpreter's lock, and units with threads hung.
        command += ["--port", str(49152 + 16 * (slot + os.getpid() % 800)), "--show-backtrace", "device"]
        if self.name == "racecheck":  # races inside a library's kernels are the library's
            command += ["--kernel-name", f"kernel_substring={NAMESPACE}"]
        else:
            command += ["--report-api-errors", "explicit"]
        return [*command, "--force-blocking-launches"] if blocking else command

    def environment(self, captures: bool, gpu: str | None) -> dict[str, str]:
        """The process's. Under memcheck every tensor is an allocation of its own, so that an access beside it shows;
        but while a graph is captured nothing can be allocated so, and PyTorch's allocator stays."""
        given = {"OMP_NUM_THREADS": "1", **os.environ}
        if gpu is not None:
            given["CUDA_VISIBLE_DEVICES"] = gpu
        if self.name == "memcheck" and not captures:
            given["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        return given


@dataclass
class Deadline:
    """When everything stops, on `time.monotonic`'s clock; moved to the past, it stops what runs."""

    at: float

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at


@dataclass(frozen=True)
class Batch:
    """Units that share a process.

    Attributes:
        units: their ids.
        captures: they capture CUDA graphs.
        blocking: every launch waits for its kernel.
    """

    units: tuple[str, ...]
    captures: bool = False
    blocking: bool = False

    @property
    def how(self) -> str:
        company = f"with {len(self.units) - 1} others" if len(self.units) > 1 else "alone"
        return f"{company}, launches blocking" if self.blocking else company

    def calmer(self, unit: str) -> Batch | None:
        """How a unit runs again where this did not end cleanly; None where there is no other way left."""
        if len(self.units) > 1:
            return Batch((unit,), self.captures)
        return None if self.blocking else Batch((unit,), self.captures, blocking=True)


@dataclass
class Log:
    """What the tool wrote.

    Attributes:
        hazards: races and invalid accesses, each once, without offsets; those of library kernels say so.
        troubles: the tool's errors of its own, and anything that is not known to be harmless.
        ended: it wrote its summary.
    """

    hazards: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    ended: bool = False

    @classmethod
    def read(cls, text: str) -> Log:
        """Read a log: paragraphs whose first line is not indented."""
        log = cls()
        hazards: dict[str, None] = {}
        troubles: dict[str, None] = {}
        for head, details in _paragraphs(text):
            if _SUMMARY.match(head):
                log.ended = True
            elif _HAZARD.match(head):
                hazards[_told(head, details)] = None
            elif not _HARMLESS.match(head):
                troubles[head] = None
        log.hazards, log.troubles = list(hazards), list(troubles)
        return log


def _paragraphs(text: str) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        line = _PREFIX.sub("", line, count=1).rstrip()
        if line and not line[0].isspace():
            found.append((line, []))
        elif line and found:
            found[-1][1].append(line.strip())
    return found


def _told(head: str, details: Sequence[str]) -> str:
    """One line: what happened, in which kernels."""
    where = [line for line in details if line.startswith(("at ", "and ", "by "))][:2]
    where = [line for line in where if not line.startswith("by ")]
    text = _OFFSETS.sub("", " ".join([head, *where]))
    return text if re.search(r"\bted::|" + NAMESPACE, text) else _LIBRARY + text


@dataclass
class Run:
    """What came of a process.

    Attributes:
        log: the tool's.
        outcomes: the kit's of those units that ended, by id.
        why: it did not end by itself: hung, or out of time; empty if it did.
        printed: the end of what it printed.
    """

    log: Log
    outcomes: dict[str, dict[str, Any]]
    why: str = ""
    printed: str = ""

    def whole(self, batch: Batch) -> bool:
        """It ended with a summary and every unit's outcome, and the tool had nothing to say."""
        said = self.log.hazards or self.log.troubles or self.why
        return not said and self.log.ended and all(unit in self.outcomes for unit in batch.units)


def run(tool: Tool, batch: Batch, folder: Path, slot: int, gpu: str | None, deadline: Deadline) -> Run:
    """Run units in one process under the tool.

    Args:
        tool: compute-sanitizer.
        batch: the units.
        folder: of the log, the kit's files and what is printed; made here.
        slot: which of the processes at once this is.
        gpu: its device as CUDA_VISIBLE_DEVICES names it; None for all.
        deadline: for all processes together.
    """
    if deadline.passed:
        return Run(Log(), {}, "the time was up before it began")
    folder.mkdir(parents=True, exist_ok=True)
    log, journal = folder / "tool.log", folder / "journal.jsonl"
    named = [part for unit in batch.units for part in ("--unit", unit)]
    kit = [sys.executable, "-m", "te_dispatch.cli", "conformance", *named, "--in-process", "--quiet"]
    kit += ["--limit", str(tool.limit_s), "--out", str(folder)]
    with open(folder / "printed.txt", "w+b") as printed:
        process = subprocess.Popen(
            tool.command(log, slot, batch.blocking) + kit,
            env=tool.environment(batch.captures, gpu),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            why = _awaited(process, journal, tool.limit_s, deadline)
        finally:
            _ended(process)
        printed.seek(max(printed.seek(0, os.SEEK_END) - 600, 0))
        tail = printed.read().decode(errors="replace")
    return Run(Log.read(_text(log)), _outcomes(_text(journal)), why, " | ".join(tail.split("\n")).strip(" |"))


def _awaited(process: subprocess.Popen[bytes], journal: Path, limit_s: float, deadline: Deadline) -> str:
    """Why the process has to be stopped; empty where it ended."""
    size, since, allowed = 0, time.monotonic(), START_S + limit_s
    while process.poll() is None:
        now = time.monotonic()
        if (grown := journal.stat().st_size if journal.exists() else 0) != size:
            size, since, allowed = grown, now, limit_s
        if deadline.passed:
            return "the time was up while it ran"
        if now - since > allowed:
            return f"hung: no unit ended for {allowed:g} s"
        time.sleep(_POLL_S)
    return ""


def _ended(process: subprocess.Popen[bytes]) -> None:
    """The tool and the program that it watches, which has the tool's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _outcomes(journal: str) -> dict[str, dict[str, Any]]:
    """By unit, from the kit's journal: a line of the run, then one per outcome; the last may be cut off."""
    found = {}
    for line in journal.splitlines()[1:]:
        try:
            outcome = json.loads(line)
        except ValueError:
            break
        found[outcome["unit"]] = outcome
    return found
