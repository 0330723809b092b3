# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch tune``: time a backend's algorithms ahead and keep the winners on disk.

A backend takes part by a module ``tuning`` in the package that its implementations live in
(``te_dispatch_<name>.tuning`` in those of this repository), with

``OPERATORS``
    names of the operators it tunes;
``tune(calls, device=0, done=None) -> rows``
    calls are facts of one operator's call each (``te-dispatch ops gemm`` lists them), sizes as ints and dtypes by
    name. It returns a row per call, and calls ``done(place, row)`` as each is there. A row repeats the call's facts
    and has ``problem`` (None, or why there is nothing to choose from), ``candidates`` (how many were timed),
    ``first_us`` and ``best_us`` (microseconds of the default and of the winner), ``gain`` (their ratio less 1),
    ``place`` (the winner's, 0 for the default) and ``algorithm`` (in words);
``cache_file() -> Path``
    where the winners are kept.

The runtime never tunes by itself: what is kept acts on calls of processes that start later.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from te_dispatch.cli.call_facts import read_facts
from te_dispatch.cli.console import FOUND, CommandError, emit, err, out
from te_dispatch.cli.ops import find_operator
from te_dispatch.core.scopes import MANAGER
from te_dispatch.core.snapshot import InstalledBackend

Call = Mapping[str, Any]
#: Recipe -> (operands of fprop, dgrad, wgrad), each (a, b) as (dtype, scaling), and how sums are accumulated.
_HYBRID = (
    (("e4m3fn", "tensor"),) * 2,
    (("e5m2", "tensor"), ("e4m3fn", "tensor")),
    (("e5m2", "tensor"), ("e4m3fn", "tensor")),
)
_ROWS, _TILES = ("e4m3fn", "block_1d"), ("e4m3fn", "block_2d")
RECIPES: Mapping[str, tuple[tuple[tuple[str, str], tuple[str, str]], ...]] = {
    "bf16": ((("bf16", "none"),) * 2,) * 3,
    "delayed": _HYBRID,
    "current": _HYBRID,
    "block": ((_ROWS, _TILES), (_ROWS, _TILES), (_ROWS, _ROWS)),
    "mxfp8": ((("e4m3fn", "mxfp8"),) * 2,) * 3,
}
_SIZES = {"hidden": None, "ffn": None, "tokens": None, "kv": 0, "gated": 0}


def tune(
    backends: Sequence[str],
    shapes: Sequence[str],
    layers: Sequence[str],
    recipes: Sequence[str],
    facts: Sequence[str],
    device: int,
    as_json: bool,
    quiet: bool,
) -> int:
    """Tune `gemm` for shapes, or for the products of transformer layers.

    Returns:
        0, or 1 where a backend had nothing to choose from for a call.
    """
    calls = [_call(shape, facts) for shape in shapes]
    calls += [call for layer in layers for recipe in recipes for call in layer_calls(layer, recipe)]
    if not calls:
        raise CommandError("nothing to tune: give --shape MxNxK or --layer hidden=...,ffn=...,tokens=...")
    if facts and not shapes:
        raise CommandError("FACT=VALUE goes with --shape; --layer takes --recipe")
    data = []
    for backend, module in _tunable(backends):
        with _progress(backend.name, len(calls), quiet or as_json) as done:
            rows = module.tune(calls, device, done)
        data.append({"backend": backend.name, "cache": str(module.cache_file()), "rows": rows})
    if as_json:
        emit({"tuned": data})
    else:
        for one in data:
            _show(one)
    return FOUND if any(row["problem"] for one in data for row in one["rows"]) else 0


def _call(shape: str, facts: Sequence[str]) -> Call:
    """A ``gemm`` of MxNxK with the given facts, else bf16 in layout NT."""
    parts = shape.lower().split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise CommandError(f"--shape takes MxNxK in whole numbers, such as 8192x4096x4096, got {shape!r}")
    operator = find_operator("gemm")
    given = read_facts(operator, facts, MANAGER.known().dtypes)
    named = {fact.partition("=")[0] for fact in facts}
    m, n, k = map(int, parts)
    call: dict[str, Any] = {"m": m, "n": n, "k": k, "layout": given.get("layout", "NT")}
    for side in "ab":
        dtype = given.get(f"{side}.dtype", "bf16")
        scaling = given.get(f"{side}.scaling") if f"{side}.scaling" in named else None
        call[f"{side}.dtype"] = dtype
        call[f"{side}.scaling"] = scaling or ("none" if dtype in ("fp32", "bf16", "fp16") else "tensor")
    for name in ("out_dtype", "split_accumulator"):
        call[name] = given.get(name)
    for name in ("bias", "accumulate"):
        call[name] = bool(given.get(name))
    return call


def layer_calls(layer: str, recipe: str) -> list[Call]:
    """The products of one training step of a transformer layer.

    Args:
        layer: ``hidden=H,ffn=F,tokens=T``, and ``kv=`` (features of keys, and of values; H if absent) and ``gated=1``.
        recipe: of `RECIPES`. Forward products of one scale per tensor accumulate fast, backward ones do not.
    """
    if recipe not in RECIPES:
        raise CommandError(f"--recipe takes {', '.join(RECIPES)}, got {recipe!r}")
    sizes = _layer_sizes(layer)
    hidden, ffn, tokens = sizes["hidden"], sizes["ffn"], sizes["tokens"]
    weights = (
        (hidden + 2 * (sizes["kv"] or hidden), hidden),
        (hidden, hidden),
        (ffn * (2 if sizes["gated"] else 1), hidden),
        (hidden, ffn),
    )
    calls: list[Call] = []
    for n, k in weights:
        for bias in (False, True):
            calls.append(_product((tokens, n, k), "NT", RECIPES[recipe][0], bias, False))
        calls.append(_product((tokens, k, n), "NN", RECIPES[recipe][1], False, True))
        calls.append(_product((n, k, tokens), "TN", RECIPES[recipe][2], False, True))
    return calls


def _product(
    size: tuple[int, int, int], layout: str, operands: tuple[tuple[str, str], tuple[str, str]], bias: bool, split: bool
) -> Call:
    (a, b), (m, n, k) = operands, size
    return {
        "m": m, "n": n, "k": k, "layout": layout, "a.dtype": a[0], "a.scaling": a[1], "b.dtype": b[0],
        "b.scaling": b[1], "out_dtype": "bf16", "bias": bias, "accumulate": False, "split_accumulator": split,
    }  # fmt: skip


def _layer_sizes(layer: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in layer.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _SIZES or not value.isdigit():
            raise CommandError(f"--layer takes hidden=H,ffn=F,tokens=T[,kv=N][,gated=1], got {part.strip()!r}")
        found[name] = int(value)
    missing = [name for name, default in _SIZES.items() if default is None and not found.get(name)]
    if missing:
        raise CommandError(f"--layer lacks {', '.join(missing)}, got {layer!r}")
    return {name: default or 0 for name, default in _SIZES.items()} | found


def _tunable(names: Sequence[str]) -> list[tuple[InstalledBackend, ModuleType]]:
    """The backends that tune, of those named or of all.

    Raises:
        CommandError: one that is named is not installed, cannot run here or tunes nothing; or there is none.
    """
    snapshot = MANAGER.snapshot
    unknown = [name for name in names if name not in snapshot.backends]
    if unknown:
        why, there = snapshot.absence(unknown[0]), ", ".join(snapshot.backends)
        raise CommandError(f"backend {unknown[0]!r} is {why}; installed: {there}")
    found, reasons = [], []
    for backend in snapshot.backends.values():
        if names and backend.name not in names:
            continue
        module = _tuning_module(backend)
        if backend.name in snapshot.unavailable:
            reasons.append(f"{backend.name} is unavailable: {snapshot.unavailable[backend.name]}")
        elif module is None:
            reasons.append(f"{backend.name} has nothing to tune")
        else:
            found.append((backend, importlib.import_module(module)))
    if not found or (names and reasons):
        raise CommandError("; ".join(reasons) or "no backend is installed")
    return found


def _tuning_module(backend: InstalledBackend) -> str | None:
    packages = {i.target.partition(":")[0].partition(".")[0] for i in backend.manifest.implementations}
    for package in sorted(packages):
        if importlib.util.find_spec(package) and importlib.util.find_spec(f"{package}.tuning"):
            return f"{package}.tuning"
    return None


@contextmanager
def _progress(backend: str, count: int, quiet: bool) -> Any:
    console = err()
    if quiet or not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"tuning {backend}", total=count)
        done: Callable[[int, Call], None] = lambda place, row: bar.update(task, completed=place + 1)  # noqa: E731
        yield done


def _show(data: Mapping[str, Any]) -> None:
    table = Table(title=f"{data['backend']}: gemm", title_justify="left")
    for name in ("m x n x k", "layout", "operands", "with", "default µs", "best µs", "gain", "timed", "algorithm"):
        table.add_column(name, justify="right" if name.endswith("µs") or name in ("gain", "timed") else "left")
    for row in data["rows"]:
        operands = " x ".join(
            row[f"{side}.dtype"]
            + ("" if row[f"{side}.scaling"] in ("none", "tensor") else f" {row[f'{side}.scaling']}")
            for side in "ab"
        )
        extras = [name for name in ("bias", "accumulate") if row[name]]
        if row["split_accumulator"]:
            extras.append("split")
        told = ["", "", "", str(row["candidates"]), Text(str(row["problem"]), "yellow")]
        if row["problem"] is None:
            gain = Text(f"{row['gain']:.1%}", "green" if row["place"] else "dim")
            told = [f"{row['first_us']:.1f}", f"{row['best_us']:.1f}", gain, str(row["candidates"]), row["algorithm"]]
        table.add_row(f"{row['m']} x {row['n']} x {row['k']}", row["layout"], operands, ", ".join(extras), *told)
    console = out()
    console.print(table)
    console.print(Text(f"kept in {data['cache']}"))
