# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every operator on the sizes of a real layer: this project's backends, PyTorch, Transformer Engine, a plain copy.

All rivals run in one process on the same random operands, in interleaved rounds; the figures are medians over the
rounds, of CUDA graph replays. Operands rotate through more memory than the device's cache holds. Before it is timed,
each rival's result is compared with plain fp32 arithmetic: whoever is wrong is not timed. The host's time is of calls
on small operands that nobody waits for. A rival that is missing or refuses shows up with the reason.

    python benchmarks/ops.py [--ops 'gemm*'] [--rivals cuda,pytorch] [--rounds 15] [--quick] [--json FILE]

A goal is a ratio within this run: at most so many times the copy, or the named rival (`side_by_side/rows.py`).
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import sys
import time
from types import ModuleType
from typing import Any

import torch
from side_by_side import inputs, machine, report, rivals, te_environment, timing
from side_by_side.rows import Goal, Row, alternate_goal, rows

#: Sets of operands rotate so that together they exceed the cache by so much.
ROTATION = 4
#: The backend that is held to the speed of the one that the goals are about.
ALTERNATE = "triton"
#: Rivals whose time decides nothing need fewer calls on the host.
HOST_CALLS = 200


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="*", help="names of rows, globs, separated by commas")
    parser.add_argument("--rivals", default=",".join(_names()), help="which rivals, separated by commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="small operands, 3 rounds: whether it runs, not how fast")
    parser.add_argument("--no-host", action="store_true", help="leave out the host's time")
    parser.add_argument("--te", help="a folder that holds Transformer Engine, to be used from there")
    parser.add_argument("--commit", help="for the record, where there is no repository")
    parser.add_argument("--json", help="also write the record here")
    parser.add_argument("--markdown", help="also write the tables here")
    options = parser.parse_args(argv)
    options.ops, options.rivals = options.ops.split(","), options.rivals.split(",")
    unknown = set(options.rivals) - set(_names())
    if unknown:
        parser.error(f"--rivals: unknown {', '.join(sorted(unknown))}; there are {', '.join(_names())}")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    if not chosen(options.ops):
        parser.error(f"--ops: no row matches {','.join(options.ops)}")
    try:
        options.device = torch.empty(1, device=options.device).device
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device: {timing.why(error)}")
    try:
        if options.te is not None:
            te_environment.site_of(options.te)
    except FileNotFoundError as error:
        parser.error(str(error))
    if options.quick:
        options.rounds = 3
    return options


def _names() -> list[str]:
    import importlib

    return [importlib.import_module(f"side_by_side.rivals.{name}").NAME for name in rivals.MODULES]


def chosen(patterns: list[str]) -> list[Row]:
    return [row for row in rows() if any(fnmatch.fnmatch(row.name, pattern) for pattern in patterns)]


def loaded(names: list[str]) -> tuple[list[ModuleType], dict[str, str | None]]:
    """The rivals that can run here, and for every one why it cannot."""
    present, state = [], {}
    for module, name in zip(rivals.MODULES, _names()):
        if name not in names:
            continue
        found = rivals.load(module)
        state[name] = found if isinstance(found, str) else None
        if not isinstance(found, str):
            present.append(found)
    return present, state


def operands(row: Row, options: argparse.Namespace) -> list[Any]:
    """As many sets as it takes for the cache to hold none of them when its turn comes again."""
    shape = row.small if options.quick else row.shape
    first = inputs.make(row, shape, options.device, seed=1)
    wanted = ROTATION * machine.l2_bytes(options.device)
    count = max(1, min(8, -(-wanted // max(inputs.size(first), 1)))) if not options.quick else 2
    if options.device.type == "cuda" and inputs.size(first) < 2**20:
        count = 1  # nothing to rotate: such a row is about launches
    return [first] + [inputs.make(row, shape, options.device, seed=seed) for seed in range(2, count + 1)]


def verified(row: Row, rival: ModuleType, data: Any, wanted: inputs.Values) -> tuple[rivals.Prepared, float | None]:
    """The prepared call, and its largest relative error; Refused where it is too large."""
    with rival.scope():
        prepared = rivals.prepare(rival, row, data)
        result = prepared.call()
    if prepared.values is None:
        return prepared, None
    errors = inputs.errors(prepared.values(result), wanted)
    wrong = {name: error for name, error in errors.items() if not error <= row.tolerance}
    if wrong:
        found = ", ".join(f"{name} {error:.2g}" for name, error in wrong.items())
        raise rivals.Refused(f"WRONG: relative error of {found}; allowed {row.tolerance}")
    return prepared, max(errors.values())


def measure(row: Row, present: list[ModuleType], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By rival: us, spread, error, method, note, host_us, or why not."""
    found: dict[str, dict[str, Any]] = {}
    sets = operands(row, options)
    wanted = inputs.expected(row, sets[0])
    entrants, hosts = [], []
    for rival in present:
        entry = found.setdefault(rival.NAME, {})
        try:
            prepared, entry["error"] = verified(row, rival, sets[0], wanted)
            entry["note"] = prepared.note
            with rival.scope():
                calls = [prepared.call] + [rivals.prepare(rival, row, data).call for data in sets[1:]]
            entrants.append(timing.Entrant(rival.NAME, calls, rival.scope))
            if not options.no_host and prepared.values is not None:
                small = inputs.make(row, row.small, options.device, seed=1)
                with rival.scope():
                    hosts.append(timing.Entrant(rival.NAME, [rivals.prepare(rival, row, small).call], rival.scope))
        except Exception as error:
            entry["refused"] = str(error) if isinstance(error, rivals.Refused) else timing.why(error)
    del wanted
    for name, times in timing.device_times(entrants, options.rounds, options.device).items():
        if isinstance(times, str):
            found[name]["refused"] = times
        else:
            found[name].update(us=times.median, spread=times.spread, method=times.method)
    calls = 20 if options.quick else HOST_CALLS
    for name, times in timing.host_times(hosts, 5, calls, options.device).items():
        if isinstance(times, str):
            found[name]["host_refused"] = times
        else:
            found[name]["host_us"] = times.median
    return found


def judged(goal: Goal | None, found: dict[str, dict[str, Any]], subject: str) -> dict[str, Any]:
    """What a goal allows in this run and whether the subject keeps it; empty where the run cannot say."""
    own = found.get(subject, {}).get("us")
    against = {name: found[name]["us"] for name in (goal.rivals if goal else ()) if "us" in found.get(name, {})}
    if goal is None or own is None or not against:
        return {}
    allowed = goal.ratio * min(against.values())
    return {"goal_us": allowed, "verdict": report.verdict(own, allowed), "met": own <= allowed}


def tables(results: list[dict[str, Any]], names: list[str], subject: str) -> list[report.Table]:
    # The goal is that of the fastest kernels this project has: `subject`.
    timed = [[r["row"], *(_us(r["rivals"].get(n, {})) for n in names), *_ratios(r, subject)] for r in results]
    columns = ["row", *names, f"{subject}/copy", f"{subject}/TE", "goal", "goal us", f"{subject}: verdict"]
    found = [report.table("Device time, us a call (median)", columns, timed)]
    if subject != ALTERNATE and any(r["alternate"] for r in results):
        found.append(report.table(f"The {ALTERNATE} backend beside {subject}, us", _BESIDE, beside(results, subject)))
    if added := totals(results, names):
        found.append(report.table("Added up, us", ["group", *names], added))
    on_host = [n for n in names if any("host_us" in r["rivals"].get(n, {}) for r in results)]
    if on_host:
        cells = [[r["row"], *(_number(r["rivals"].get(n, {}).get("host_us")) for n in on_host)] for r in results]
        found.append(report.table("Host time, us a call on small operands", ["row", *on_host], cells))
    reasons = [
        [r["row"], name, entry["refused"]]
        for r in results
        for name, entry in r["rivals"].items()
        if entry.get("refused") and name != "copy"
    ]
    if reasons:
        found.append(report.table("Refused, or wrong", ["row", "rival", "why"], reasons))
    return found


_BESIDE = ["row", "goal us", ALTERNATE, "ratio", "verdict"]


def beside(results: list[dict[str, Any]], subject: str) -> list[list[str]]:
    """The alternate backend's times, as a ratio to the subject's."""
    cells = []
    for r in results:
        if r["alternate"]:
            own, other = r["rivals"][ALTERNATE]["us"], r["rivals"][subject]["us"]
            goal_us, verdict = r["alternate"]["goal_us"], r["alternate"]["verdict"]
            cells.append([r["row"], _number(goal_us), _number(own), f"{own / other:.2f}", verdict])
    return cells


def totals(results: list[dict[str, Any]], names: list[str]) -> list[list[str]]:
    """Each group's times added up, for rivals that have all of them."""
    found = []
    for group in dict.fromkeys(r["group"] for r in results if r["group"]):
        members = [r["rivals"] for r in results if r["group"] == group]
        sums = [[m.get(name, {}).get("us") for m in members] for name in names]
        found.append(
            [f"{group} ({len(members)} rows)", *(_number(None if None in each else sum(each)) for each in sums)]
        )
    return found


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _us(entry: dict[str, Any]) -> str:
    if "us" in entry:
        return f"{entry['us']:.1f}" + ("" if entry["method"] != "events" else "*")
    if not entry.get("refused") or entry["refused"] == "arithmetic decides":
        return "-"
    return "WRONG" if entry["refused"].startswith("WRONG") else "refused"


def _ratios(result: dict[str, Any], subject: str) -> list[str]:
    found = result["rivals"]
    own = found.get(subject, {}).get("us")
    cells = []
    for other in ("copy", "transformer_engine"):
        base = found.get(other, {}).get("us")
        cells.append(f"{own / base:.2f}" if own and base else "-")
    verdict = result.get("judged", {})
    return [*cells, result["goal"] or "-", _number(verdict.get("goal_us")), verdict.get("verdict", "-")]


def subject_of(present: list[ModuleType]) -> str:
    """The backend that the goals are about: the machine's native one, else the best there is."""
    names = [rival.NAME for rival in present]
    return next((name for name in ("cuda", "triton", "torch_backend") if name in names), names[0])


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    te_environment.enter(options.te)
    report.heed_termination()
    present, state = loaded(options.rivals)
    subject = subject_of(present) if present else "none"
    record: dict[str, Any] = {
        "benchmark": "operators",
        "machine": machine.facts(options.commit, options.device),
        "rivals": state,
        "rounds": options.rounds,
        "quick": options.quick,
        "results": [],
        "notes": ["*: not captured in a CUDA graph, but queued behind a sleep."],
    }
    everything, start = chosen(options.ops), time.monotonic()
    try:
        for number, row in enumerate(everything, 1):
            print(f"[{number}/{len(everything)}, {time.monotonic() - start:.0f} s] {row.name}", file=sys.stderr)
            found = measure(row, present, options)
            record["results"].append(
                {
                    "row": row.name,
                    "shape": row.small if options.quick else row.shape,
                    "moved": row.moved,
                    "flops": row.flops,
                    "group": row.group,
                    "goal": str(row.goal) if row.goal else None,
                    "rivals": found,
                    "judged": judged(row.goal, found, subject),
                    "alternate": judged(alternate_goal(row), found, ALTERNATE),
                }
            )
            gc.collect()
            if options.device.type == "cuda":
                timing.synchronize(options.device)
                torch.cuda.empty_cache()
    finally:
        # A fault on the device ends the run, not what was found before.
        record["tables"] = tables(record["results"], list(state), subject)
        report.show_head(record)
        for each in record["tables"]:
            report.show_table(each)
        if options.json:
            report.save(record, options.json)
        if options.markdown:
            with open(options.markdown, "w", encoding="utf-8") as file:
                file.write(report.markdown(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
