# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""How many of the faults the kit catches.

``python -m te_dispatch_faulty.score [--level smoke] [--remember] [fault ...]`` prints one JSON object a line. Each
fault gets the units that the kit plans for its implementation at each of the fault's levels, until the first one
fails. The plan is the same for all faults of an implementation, for it is sound until one is switched on: it is made
once, and each unit is run for one fault after the other, so that what it expects is computed once. What caught a
fault it must pass where no fault is switched on: a case on which both fail finds nothing out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from te_dispatch.conformance.bench import bench_of
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.checks import checks
from te_dispatch.conformance.execute import Bench, run_unit
from te_dispatch.conformance.isolation import Worker
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.planning import plan
from te_dispatch.conformance.settings import Settings
from te_dispatch.core.operator import OPERATORS
from te_dispatch_faulty import binding
from te_dispatch_faulty.catalogue import FAULTS
from te_dispatch_faulty.fault import KNOWN_FILE, LIKELY, Fault

#: Seconds after which a unit of a fault that blocks its process is given up.
HUNG_S = 20.0
#: Cases that come before the checks of behaviour. Most faults show in far fewer.
EARLY = 48
#: Units after which a fault took long to find: its unit is remembered, and comes first from then on.
LONG = 4


@dataclasses.dataclass
class Verdict:
    """What became of a fault.

    Attributes:
        fault: its name.
        level: at which it was hunted.
        caught: by the id of a unit; empty where nothing was found.
        message: of the unit.
        control: the state of the same unit without the fault.
        units: run until the first failure.
        seconds: they took.
    """

    fault: str
    level: str
    caught: str = ""
    message: str = ""
    control: str = ""
    units: int = 0
    seconds: float = 0.0


class Hunt:
    """The faults of one implementation at one level.

    Raises:
        BindError: the implementation cannot be called at all, which would look as if all were caught.
    """

    def __init__(self, bench: Bench, level: str, faults: Sequence[Fault]) -> None:
        self.bench, self.faults = bench, faults
        first = faults[0]
        self.settings = Settings(
            backends=(first.implementation.partition(".")[0],), operators=(first.operator,),
            implementations=(first.implementation,), level=level, device="cpu", limit_s=HUNG_S,
        )  # fmt: skip
        bench.manager.functions.bound(OPERATORS[first.operator], first.implementation)
        self._units = list(ordered(list(plan(bench.manager, self.settings).units)))
        self._controls: dict[str, str] = {}

    def verdicts(self) -> Iterator[Verdict]:
        """One for each fault, as soon as it is known."""
        open_: dict[Fault, Verdict] = {}
        for fault in self.faults:
            verdict = Verdict(fault.name, self.settings.level)
            likely = [unit for unit in self._units if unit.id == LIKELY[self.settings.level].get(fault.name)]
            if fault.isolated:
                self._isolated(fault, verdict, [*likely, *self._units])
            elif not any(self._caught(fault, verdict, unit) for unit in likely):
                open_[fault] = verdict
                continue
            yield verdict
        for unit in self._units:
            for fault, verdict in list(open_.items()):
                if self._caught(fault, verdict, unit):
                    yield open_.pop(fault)
        yield from open_.values()

    def _caught(self, fault: Fault, verdict: Verdict, unit: Unit) -> bool:
        with unchanged_world(), binding.fault(fault):
            return self._noted(verdict, unit, run_unit(unit, self.bench))

    def _isolated(self, fault: Fault, verdict: Verdict, units: Sequence[Unit]) -> None:
        with binding.fault(fault):
            worker = Worker(self.settings)
            try:
                any(self._noted(verdict, unit, worker.run(unit)) for unit in units)
            finally:
                worker.stop()

    def _noted(self, verdict: Verdict, unit: Unit, outcome: Outcome) -> bool:
        verdict.units += 1
        verdict.seconds += outcome.seconds
        if outcome.state != "failed":
            return False
        control = self._control(unit)
        if control != "passed":
            return False
        verdict.caught, verdict.message, verdict.control = outcome.unit, outcome.message, control
        return True

    def _control(self, unit: Unit) -> str:
        if unit.id not in self._controls:
            with binding.fault(None):
                self._controls[unit.id] = run_unit(unit, self.bench).state
        return self._controls[unit.id]


@contextmanager
def unchanged_world() -> Iterator[None]:
    """A block behind which the process is as it was: some faults are of what a call leaves behind."""
    threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_flush_denormal(False)


def ordered(units: Sequence[Unit]) -> Iterator[Unit]:
    """All units: some of the check that every case gets, then that and a unit of each of the others in turn."""
    first, *others = (check.name for check in checks())
    of_check = {name: _alternating([unit for unit in units if unit.check == name]) for name in (first, *others)}
    of_cases = of_check.pop(first)
    yield from of_cases[:EARLY]
    yield from _in_turn([of_cases[EARLY:], list(_in_turn(list(of_check.values())))])


def _alternating(units: Sequence[Unit]) -> list[Unit]:
    """The first unit of every space, then the second of each: a fault may show in only one of them."""
    by_space: dict[str, list[Unit]] = {}
    for unit in units:
        by_space.setdefault(unit.case.space, []).append(unit)
    return list(_in_turn(list(by_space.values())))


def _in_turn(rows: Sequence[Sequence[Unit]]) -> Iterator[Unit]:
    """The first unit of every row, then the second of each."""
    for column in itertools.zip_longest(*rows):
        yield from (unit for unit in column if unit is not None)


def mine(group: str, share: Path | None) -> bool:
    """Whether no other process that shares the folder has taken a group of faults."""
    if share is None:
        return True
    try:
        (share / group).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def remember(verdicts: Sequence[Verdict]) -> None:
    """Write down where these faults were caught."""
    known = json.loads(KNOWN_FILE.read_text())
    smoke, likely = set(known["smoke"]), known["likely"]
    for one in verdicts:
        if one.level == "smoke":
            (smoke.add if one.caught else smoke.discard)(one.fault)
        of_level = likely[one.level]
        if one.caught and one.units > LONG:
            of_level[one.fault] = one.caught
        elif one.caught != of_level.get(one.fault):
            of_level.pop(one.fault, None)
    known = {"smoke": sorted(smoke), "likely": likely}
    KNOWN_FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("faults", nargs="*")
    parser.add_argument("--level", help="of the kit, instead of each fault's own levels")
    parser.add_argument("--share", type=Path, help="a folder: processes that are given it share the faults among them")
    parser.add_argument("--remember", action="store_true", help="write known.json")
    asked = parser.parse_args(arguments)
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in FAULTS:
        if not asked.faults or fault.name in asked.faults:
            for level in (asked.level,) if asked.level else fault.levels:
                groups.setdefault((fault.implementation, level), []).append(fault)
    bench = bench_of(Settings(backends=("faulty", "narrow", "single"), device="cpu"))
    started, found = time.process_time(), []
    for (implementation, level), faults in groups.items():
        if mine(f"{implementation}-{level}", asked.share):
            for verdict in Hunt(bench, level, faults).verdicts():
                print(json.dumps(dataclasses.asdict(verdict)), flush=True)
                found.append(verdict)
    if asked.remember:
        remember(found)
    print(json.dumps({"process": os.getpid(), "seconds": time.process_time() - started}), flush=True)


if __name__ == "__main__":
    main()
