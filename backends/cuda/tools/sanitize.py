#!/usr/bin/env python3
# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The conformance units that this backend claims, under compute-sanitizer.

    python tools/sanitize.py --tool racecheck                    shared-memory hazards of this backend's kernels
    python tools/sanitize.py --tool memcheck                     invalid accesses of any kernel, the libraries' too
    python tools/sanitize.py --tool racecheck --resume           only what has no verdict yet
    python tools/sanitize.py --op gemm --check capture           some units, chosen as `te-dispatch conformance` does

First the units run without the tool: that says which are claimed, and which fail by themselves. Then a few units of one
operator at a time make a process under the tool, several processes at once, over all visible GPUs. Where a process does
not end cleanly, each of its units runs alone, and where that does not either, alone with launches that block.

A unit's verdict is one of:

    clean        it passed under the tool, which had nothing to say
    hazard       a race, or an invalid access; with the kernels
    failed       it fails without the tool too
    tool         the tool's own error, or a failure that only occurs under it; with the text
    unfinished   it hung, or the time was up

The exit code is 0 if all are clean, 1 for a hazard or a failure, 3 if only verdicts are missing, or the tool overlooked
a kernel that is wrong on purpose. Verdicts and logs are in the folder that --out names.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sanitizer
from sanitizer import Batch, Deadline, Log, Run, Tool

BACKEND = "cuda"
STATES = ("clean", "hazard", "failed", "tool", "unfinished")
#: Verdicts that --resume keeps.
SETTLED = ("clean", "hazard")
#: Seconds between lines of progress.
_PROGRESS_S = 10.0

# A kernel of this backend by its name, wrong in the way that the tool is there to find.
_PLANTED = {
    "racecheck": "__shared__ float s[64]; s[threadIdx.x] = threadIdx.x; out[threadIdx.x] = s[63 - threadIdx.x];",
    "memcheck": "out[threadIdx.x + (1ll << 40)] = 1;",
}
_PLANTING = """
import torch
kernel = torch.cuda._compile_kernel('extern "C" __global__ void {name}(float* out) {{ {body} }}', "{name}")
kernel((1, 1, 1), (64, 1, 1), [torch.zeros(64, device="cuda")])
torch.cuda.synchronize()
"""


@dataclass
class Verdict:
    """What is known of a unit.

    Attributes:
        unit: its id.
        state: of `STATES`.
        found: of a hazard: what happened, in which kernels.
        message: of the others: what the tool or the kit said.
        how: in what company it ran.
    """

    unit: str
    state: str
    found: list[str] = field(default_factory=list)
    message: str = ""
    how: str = ""


def claimed(options: argparse.Namespace, jobs: int, journal: Path) -> list[Any]:
    """Without the tool: the outcomes of all units that the backend claims, in the plan's order.

    Raises:
        SystemExit: the options name what does not exist, or what --resume finds is of another run.
    """
    from te_dispatch.conformance import Settings, certify

    try:
        asked = {"operators": tuple(options.op), "checks": tuple(options.check), "level": options.level}
        settings = Settings((BACKEND,), **asked, jobs=min(jobs, 12))
        report = certify(settings=settings, journal_file=journal, resume=options.resume and journal.exists())
    except ValueError as error:  # UsageError is one
        raise SystemExit(str(error)) from error
    return [outcome for outcome in report.outcomes if outcome.state != "not_claimed"]


def batches(outcomes: Sequence[Any], size: int, first: Sequence[str] = ()) -> list[Batch]:
    """Units of one operator and one allocator together, at most `size`; operators that `first` names come first."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for outcome in outcomes:
        unit = outcome.parsed
        groups.setdefault((unit.case.operator, unit.check == "capture"), []).append(outcome.unit)

    def place(key: tuple[str, bool]) -> int:
        return next((i for i, pattern in enumerate(first) if fnmatch.fnmatch(key[0], pattern)), len(first))

    made = []
    for key in sorted(groups, key=place):
        units, parts = groups[key], -(-len(groups[key]) // size)
        stretches = (units[len(units) * i // parts : len(units) * (i + 1) // parts] for i in range(parts))
        made += [Batch(tuple(stretch), captures=key[1]) for stretch in stretches]
    return made


def judged(batch: Batch, run: Run, late: bool) -> tuple[list[Verdict], list[Batch]]:
    """The verdicts that follow from one process, and what is to run for lack of one.

    Args:
        batch: what ran.
        run: what came of it.
        late: the time is up, and nothing runs again.
    """
    verdicts, again = [], []
    whole = run.whole(batch)
    for unit in batch.units:
        outcome = run.outcomes.get(unit)
        if whole and outcome is not None and outcome["state"] == "passed":
            verdicts.append(Verdict(unit, "clean", how=batch.how))
        elif run.log.hazards and (late or len(batch.units) == 1):
            verdicts.append(Verdict(unit, "hazard", run.log.hazards, how=batch.how))
        elif not late and (calmer := batch.calmer(unit)) is not None:
            again.append(calmer)
        else:
            verdicts.append(_undecided(unit, batch, run, outcome))
    return verdicts, again


def _undecided(unit: str, batch: Batch, run: Run, outcome: dict[str, Any] | None) -> Verdict:
    said = list(run.log.troubles)
    if outcome is not None and outcome["state"] != "passed":
        said.append(f"{outcome['state'].replace('_', ' ')} only under the tool: {outcome['message']}")
    if run.why:
        said.append(run.why)
    elif outcome is None:
        said.append(f"it ended before the unit did; it last printed: {run.printed}")
    elif not run.log.ended:
        said.append("the tool wrote no summary")
    return Verdict(unit, "unfinished" if run.why else "tool", message="; ".join(said), how=batch.how)


class Sweep:
    """Runs batches until every unit has a verdict or the time is up.

    Args:
        run: makes one process of a batch; which of those at once this is, and how many went before it there.
        jobs: processes at once.
        deadline: nothing runs again after it.
        tell: called with every verdict as it comes, by one thread at a time. A later one of a unit replaces the first.
    """

    def __init__(
        self, run: Callable[[Batch, int, int], Run], jobs: int, deadline: Deadline, tell: Callable[[Verdict], None]
    ) -> None:
        self._run, self._jobs, self._deadline, self._tell = run, jobs, deadline, tell
        self._waiting: deque[Batch] = deque()
        self._running = self._working = 0
        self._changed = threading.Condition()
        self._seen_in_company: list[tuple[Batch, list[str]]] = []
        self._hazardous: set[str] = set()
        self._error: BaseException | None = None

    def judge(self, planned: Sequence[Batch]) -> None:
        """Judge all units of the batches; those that run again do so behind the others."""
        self._waiting.extend(planned)
        self._working = self._jobs
        for slot in range(self._jobs):
            threading.Thread(target=self._work, args=(slot,), daemon=True).start()
        try:
            self._wait_for_all()
        except KeyboardInterrupt:
            self._deadline.at = 0.0
            self._wait_for_all()
            raise
        if self._error is not None:
            raise self._error
        for batch, hazards in self._seen_in_company:
            if self._hazardous.isdisjoint(batch.units):  # nobody's alone: then everybody's
                for unit in batch.units:
                    self._tell(Verdict(unit, "hazard", hazards, "seen in company, but not alone", batch.how))

    def _wait_for_all(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._working)

    def _work(self, slot: int) -> None:
        try:
            for number, batch in enumerate(self._taken()):
                self._take(batch, self._run(batch, slot, number))
        except BaseException as error:  # raised again by `judge`
            self._error = error
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _taken(self) -> Iterator[Batch]:
        """One batch after the other, while there are any or one that runs may give more."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or not self._running or self._error is not None)
                if not self._waiting or self._error is not None:
                    return
                batch = self._waiting.popleft()
                self._running += 1
            yield batch

    def _take(self, batch: Batch, run: Run) -> None:
        verdicts, again = judged(batch, run, late=self._deadline.passed)
        with self._changed:
            if run.log.hazards and len(batch.units) > 1:
                self._seen_in_company.append((batch, run.log.hazards))
            for verdict in verdicts:
                if verdict.state == "hazard":
                    self._hazardous.add(verdict.unit)
                self._tell(verdict)
            self._waiting.extend(again)
            self._running -= 1
            self._changed.notify_all()


class Ledger:
    """Verdicts by unit, in a file behind a line that says of which run, with lines of progress.

    Args:
        path: the file.
        run: what tells this run from others, as JSON.
        total: units that there are.
        resume: keep what the file holds of `SETTLED`.

    Raises:
        ValueError: with `resume`: the file is of another run.
    """

    def __init__(self, path: Path, run: dict[str, Any], total: int, resume: bool) -> None:
        self.verdicts: dict[str, Verdict] = {}
        self._total = total
        self._started = self._said = time.monotonic()
        if resume and path.exists():
            head, *lines = path.read_text().splitlines()
            if json.loads(head) != run:
                raise ValueError(f"{path} is of another run: {head}")
            kept = [Verdict(**json.loads(line)) for line in lines if line.endswith("}")]
            self.verdicts = {verdict.unit: verdict for verdict in kept}
            self.verdicts = {unit: verdict for unit, verdict in self.verdicts.items() if verdict.state in SETTLED}
        self._file = open(path, "w")  # noqa: SIM115  # it stays open: a line per verdict
        self._write(run)
        for verdict in self.verdicts.values():
            self._write(dataclasses.asdict(verdict))

    def _write(self, data: dict[str, Any]) -> None:
        self._file.write(json.dumps(data) + "\n")
        self._file.flush()

    def add(self, verdict: Verdict) -> None:
        """Keep a verdict, instead of an earlier one of its unit."""
        self.verdicts[verdict.unit] = verdict
        self._write(dataclasses.asdict(verdict))
        if verdict.state != "clean":
            say(described(verdict))
        if time.monotonic() - self._said > _PROGRESS_S or len(self.verdicts) == self._total:
            self._said = time.monotonic()
            so_far = f"{len(self.verdicts)} of {self._total} units, {self.counted()}"
            say(f"{self._said - self._started:4.0f} s: {so_far}")

    def counted(self) -> str:
        counts = Counter(verdict.state for verdict in self.verdicts.values())
        return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "none yet"


def say(line: str) -> None:
    """A line of progress: what is printed otherwise is the result."""
    print(line, file=sys.stderr, flush=True)


def described(verdict: Verdict) -> str:
    lines = [f"{verdict.state}: {verdict.unit} ({verdict.how})", *verdict.found]
    return "\n  ".join(lines + ([verdict.message] if verdict.message else []))


def control(tool: Tool, folder: Path, gpu: str | None) -> str:
    """Whether the tool finds a hazard that is planted, in words; empty if it does."""
    folder.mkdir(parents=True, exist_ok=True)
    planting = _PLANTING.format(name=sanitizer.NAMESPACE + "_planted", body=_PLANTED[tool.name])
    command = [*tool.command(folder / "tool.log", 0, blocking=False), sys.executable, "-c", planting]
    environment = tool.environment(captures=False, gpu=gpu)
    with open(folder / "printed.txt", "w") as printed, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=environment, stdout=printed, stderr=printed, timeout=sanitizer.START_S, check=False)
    log = Log.read((folder / "tool.log").read_text() if (folder / "tool.log").exists() else "")
    if any(sanitizer.NAMESPACE in hazard for hazard in log.hazards):
        return ""
    return f"{tool.name} did not report a kernel that is wrong on purpose ({folder}): what it calls clean may not be"


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds above 0")
    return seconds


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=sorted(_PLANTED), default="racecheck")
    parser.add_argument("--level", choices=("smoke", "full"), default="smoke")
    parser.add_argument("--op", action="append", default=[], help="operator, family or glob; repeat it")
    parser.add_argument("--check", action="append", default=[], help="only this check, such as capture; repeat it")
    parser.add_argument("--first", action="append", default=[], help="operators, as a glob, that come first; repeat it")
    parser.add_argument("--batch", type=_count, default=10, help="units of a process")
    parser.add_argument("--jobs", type=_count, help="processes at once; 6 for each GPU where processors suffice")
    parser.add_argument("--limit", type=_seconds, default=60.0, metavar="SECONDS", help="for each unit, under the tool")
    parser.add_argument("--time", type=_seconds, default=3600.0, metavar="SECONDS", help="for all")
    parser.add_argument("--out", type=Path, help="folder of verdicts and logs; te_dispatch_TOOL")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run found clean or hazardous")
    parser.add_argument("--json", action="store_true", help="print all verdicts as one JSON document")
    parser.add_argument("--program", default=_program(), help="compute-sanitizer")
    options = parser.parse_args()
    if shutil.which(options.program) is None:
        parser.error(f"--program: {options.program} is no program; compute-sanitizer comes with the CUDA toolkit")
    return options


def _program() -> str:
    return shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def _gpus() -> list[str]:
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


def main() -> int:
    options = _options()
    deadline = Deadline(time.monotonic() + options.time)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is to be ended, and is not in this group
    tool = Tool(options.tool, options.program, options.limit)
    out = options.out or Path(f"te_dispatch_{tool.name}")
    out.mkdir(parents=True, exist_ok=True)
    gpus = _gpus()
    jobs = options.jobs or max(1, min(6 * max(1, len(gpus)), (os.cpu_count() or 2) // 2))
    with ThreadPoolExecutor() as pool:
        planted = pool.submit(control, tool, out / "control", gpus[0] if gpus else None)
        outcomes = claimed(options, jobs, out / "plain.jsonl")
    say(f"{len(outcomes)} units are claimed at level {options.level}; {jobs} processes on {len(gpus)} GPUs")
    if overlooked := planted.result():
        say(overlooked)
    run = {"tool": tool.name, "level": options.level, "operators": options.op, "checks": options.check}
    ledger = Ledger(out / "verdicts.jsonl", run, len(outcomes), options.resume)
    for outcome in outcomes:
        if outcome.state != "passed":
            ledger.add(Verdict(outcome.unit, "failed", message=outcome.message, how="without the tool"))
    logs = out / time.strftime("logs-%H%M%S")

    def process(batch: Batch, slot: int, number: int) -> Run:
        gpu = gpus[slot % len(gpus)] if gpus else None
        return sanitizer.run(tool, batch, logs / f"{slot:02}-{number:03}", slot, gpu, deadline)

    open_ones = [outcome for outcome in outcomes if outcome.unit not in ledger.verdicts]
    Sweep(process, jobs, deadline, ledger.add).judge(batches(open_ones, options.batch, options.first))
    verdicts = [dataclasses.asdict(ledger.verdicts[outcome.unit]) for outcome in outcomes]
    data = {**run, "version": tool.version(), "control": overlooked or "found", "verdicts": verdicts}
    (out / "verdicts.json").write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(data) if options.json else f"{tool.name}: {len(verdicts)} units, {ledger.counted()}")
    states = {verdict["state"] for verdict in verdicts}
    return 1 if states & {"hazard", "failed"} else 3 if overlooked or states != {"clean"} else 0


if __name__ == "__main__":
    raise SystemExit(main())
