# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""How many of the faults the kit catches: ``python -m te_dispatch_faulty.score [--part 1/2] [fault ...]``.

Each fault gets the cases of its own operator at level ``full``, check by check, until the first one fails. What caught
it must pass on the sound implementation that was spoiled: a case on which both fail finds nothing out. One JSON object
a line.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence

from te_dispatch.conformance import checks
from te_dispatch.conformance.bench import bench_of
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.execute import Bench, run_unit
from te_dispatch.conformance.isolation import Worker
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.planning import plan
from te_dispatch.conformance.settings import Settings
from te_dispatch.core.operator import OPERATORS
from te_dispatch_faulty.catalogue import FAULTS, Fault

#: Seconds after which a unit of a fault that blocks its process is given up.
HUNG_S = 5.0
#: Cases that come before the checks of behaviour. Most faults show in far fewer.
EARLY = 48


@dataclasses.dataclass
class Verdict:
    """What became of a fault.

    Attributes:
        fault: its name.
        caught: by the id of a unit; empty where nothing was found.
        message: of the unit.
        control: the state of the same unit on the sound implementation.
        units: run before the first failure.
        seconds: they took.
    """

    fault: str
    caught: str = ""
    message: str = ""
    control: str = ""
    units: int = 0
    seconds: float = 0.0


def settings_of(fault: Fault) -> Settings:
    """Of the units that are to catch a fault."""
    return Settings(
        backends=("faulty",), operators=(fault.operator,), implementations=(f"faulty.{fault.name}",), level="full",
        device="cpu", limit_s=HUNG_S,
    )  # fmt: skip


def hunt(fault: Fault, bench: Bench) -> Verdict:
    """Run a fault's units until one fails.

    Raises:
        BindError: the fault cannot be called at all, which would look as if it were caught.
    """
    bench.manager.bound(OPERATORS[fault.operator], f"faulty.{fault.name}")
    verdict, started = Verdict(fault.name), time.perf_counter()
    for outcome in _outcomes(fault, bench):
        verdict.units += 1
        if outcome.state == "failed":
            found = outcome.parsed
            verdict.caught, verdict.message = outcome.unit, outcome.message
            verdict.control = run_unit(Unit(f"loopback.{fault.base}", found.check, found.case), bench).state
            break
    verdict.seconds = time.perf_counter() - started
    return verdict


def _outcomes(fault: Fault, bench: Bench) -> Iterator[Outcome]:
    settings = settings_of(fault)
    worker = Worker(settings) if fault.isolated else None
    try:
        for unit in _ordered(bench, settings):
            yield run_unit(unit, bench) if worker is None else worker.run(unit)
    finally:
        if worker is not None:
            worker.stop()


def _ordered(bench: Bench, settings: Settings) -> Iterator[Unit]:
    """All units: some of the check that every case gets, then that and the others in turn."""
    first, *others = (check.name for check in checks.checks())

    def planned(name: str) -> Iterator[Unit]:
        return _alternating(list(plan(bench.manager, dataclasses.replace(settings, checks=(name,))).units))

    of_cases = planned(first)
    yield from itertools.islice(of_cases, EARLY)
    # Planned one after the other: it takes as long as running some.
    of_behaviour = itertools.chain.from_iterable(planned(name) for name in others)
    for pair in itertools.zip_longest(of_cases, of_behaviour):
        yield from (unit for unit in pair if unit is not None)


def _alternating(units: Sequence[Unit]) -> Iterator[Unit]:
    """The first unit of every space, then the second of each: a fault may show in only one of them."""
    by_space: dict[str, list[Unit]] = {}
    for unit in units:
        by_space.setdefault(unit.case.space, []).append(unit)
    for row in itertools.zip_longest(*by_space.values()):
        yield from (unit for unit in row if unit is not None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("faults", nargs="*")
    parser.add_argument("--part", default="1/1")
    asked = parser.parse_args(arguments)
    part, parts = (int(n) for n in asked.part.split("/"))
    chosen = [fault for fault in FAULTS if not asked.faults or fault.name in asked.faults]
    bench = bench_of(Settings(backends=("faulty",), device="cpu"))
    for fault in chosen[part - 1 :: parts]:
        print(json.dumps(dataclasses.asdict(hunt(fault, bench))), flush=True)


if __name__ == "__main__":
    main()
