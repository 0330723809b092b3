# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch doctor``: what is installed, what this machine has, and what is broken.

Nothing of a backend but its manifest is imported into this process, and that only after a process of its own has
survived it: manifests are tried, and probes run, in `te_dispatch.core.probing`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import te_dispatch
import te_dispatch.ops.declared  # fills OPERATORS
from te_dispatch.cli import nvte_plugin
from te_dispatch.cli.console import FOUND, emit, out
from te_dispatch.cli.doctor_manifests import notes, unknown_facts, without_companion
from te_dispatch.compat.alias import STAND_IN
from te_dispatch.compat.alias import found as find_transformer_engine
from te_dispatch.core.discovery import find, misspelt_groups
from te_dispatch.core.environment import debug_setting, environment_layers
from te_dispatch.core.errors import PolicyError
from te_dispatch.core.nvte_variables import ignored
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.policy.file import load_policy
from te_dispatch.core.policy.known import Known
from te_dispatch.core.probing import TIME_LIMIT, Answer, asked, probes_of, run_probes
from te_dispatch.core.results import checking_results
from te_dispatch.core.shipped import shipped_policies
from te_dispatch.core.snapshot import InstalledBackend, PluginFailure, Snapshot, grouped
from te_dispatch.core.trial import fatal_manifests

PREFIXES = ("TE_DISPATCH_", "NVTE_")


def doctor(as_json: bool, time_limit: float = TIME_LIMIT, tracebacks: bool = False) -> int:
    """Examine this installation.

    Args:
        time_limit: seconds for one answer of a plugin.
        tracebacks: whether to show those of what plugins raised.

    Returns:
        0, or 1 where something installed is broken. A backend that is unavailable on this machine is not broken.
    """
    data = examine(time_limit)
    if not tracebacks:
        del data["tracebacks"]
    if as_json:
        emit(data)
    else:
        _show(data, out())
    return FOUND if data["problems"] else 0


#: The probe of names that PyTorch does not document.
_TORCH_PRIVATE = ("doctor", "", "te_dispatch.torch_private:examine")


def examine(time_limit: float = TIME_LIMIT) -> dict[str, Any]:
    """Everything that `doctor` tells, as plain data; ``problems`` is what makes it fail."""
    snapshot = find(OPERATORS, fatal_manifests(time_limit))
    backends = list(snapshot.backends.values())

    def ask(backend: InstalledBackend) -> list[Answer]:
        return run_probes(probes_of(backend.manifest, snapshot.unusable), time_limit, backend.manifest)

    torch = _installed("torch")
    # Each child imports PyTorch: more at a time than there are CPUs would only make each other exceed their limit.
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        private = pool.submit(run_probes, [_TORCH_PRIVATE] if torch else [], time_limit)
        asked = list(pool.map(ask, backends))
    answers = dict(zip((b.name for b in backends), asked))
    devices = _devices(backends, answers)
    shown = [_backend(backend, snapshot, answers[backend.name]) for backend in backends]
    formats = {(i.operator, i.saved_format) for backend in backends for i in backend.manifest.implementations}
    for backend, data_of_one in zip(backends, shown):
        data_of_one["unknown_facts"] = unknown_facts(backend, answers[backend.name], devices, snapshot.unusable)
        data_of_one["without_companion"] = without_companion(backend, formats)
        data_of_one["notes"] = notes(backend, snapshot, devices)
    known = Known.of([backend.manifest for backend in backends], OPERATORS)
    imported, doubled = _transformer_engine()
    plugin = nvte_plugin.examine(time_limit)
    failed = plugin.pop("traceback") if plugin else ""
    data: dict[str, Any] = {
        "python": platform.python_version(),
        "te_dispatch": te_dispatch.__version__,
        "torch": torch,
        "torch_replaced": [name for answer in private.result() for name, _, _ in answer.value or ()],
        "transformer_engine": imported,
        "nvte_plugin": plugin,
        "devices": devices,
        "backends": shown,
        "failures": [_failure(failure) for failure in snapshot.failures],
        "misspelt_groups": misspelt_groups(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIXES)},
        "without_effect": list(ignored(os.environ).values()),
        "policies": _policies(known),
        "tracebacks": _tracebacks(snapshot, answers),
    }
    data["tracebacks"] += [{"of": f"NVTE_PLUGIN={nvte_plugin.PLUGIN}", "traceback": failed}] if failed else []
    data["problems"] = [*_problems(data, known), *doubled]
    data["problems"] += [f"PyTorch {torch}: {answer.problem}" for answer in private.result() if answer.problem]
    data["problems"] += [plugin["problem"]] if plugin and plugin["problem"] else []
    return data


def _failure(failure: PluginFailure) -> dict[str, str]:
    return {name: getattr(failure, name) for name in ("name", "distribution", "version", "reason")}


def _tracebacks(snapshot: Snapshot, answers: dict[str, list[Answer]]) -> list[dict[str, str]]:
    found = [(f"backend {f.name!r} of {f.distribution} {f.version}", f.traceback) for f in snapshot.failures]
    for name, given in answers.items():
        found += [(f"backend {name!r}: {answer.kind} {answer.subject}".strip(), answer.traceback) for answer in given]
    return [{"of": where, "traceback": text} for where, text in found if text]


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _transformer_engine() -> tuple[str, list[str]]:
    """What ``import transformer_engine`` gives in a process that asks for nothing special, and what is wrong there."""
    there = find_transformer_engine()
    if there is None:
        return "not installed", []
    place, is_ours = there
    if is_ours:
        return f"te_dispatch ({place})", []
    problems = []
    if _installed(STAND_IN):
        problems.append(
            f"Transformer Engine itself ({place}) and {STAND_IN} are both installed: the former is imported, the "
            "version in the metadata is either's; uninstall one"
        )
    return f"{_installed('transformer-engine') or 'unknown version'} ({place})", problems


def _backend(backend: InstalledBackend, snapshot: Snapshot, answers: list[Answer]) -> dict[str, Any]:
    manifest = backend.manifest
    by_kind = {kind: [a for a in answers if a.kind == kind] for kind in ("unavailable", "doctor", "implementation")}
    reasons = (f"{a.what} {a.problem}" if a.problem else a.value for a in by_kind["unavailable"] if a.unavailable)
    reason = next(reasons, None)
    unusable = {name: why for name, why in snapshot.unusable.items() if name.partition(".")[0] == manifest.name} | {
        a.subject: a.problem for a in by_kind["implementation"] if a.problem
    }
    return {
        "name": manifest.name,
        "description": manifest.description,
        "distribution": backend.distribution,
        "version": backend.version,
        "native_to": list(manifest.vendors),
        "implementations": len(manifest.implementations),
        "available": reason is None,
        "reason": reason,
        "doctor": [dict(zip(("subject", "state", "reason"), row)) for a in by_kind["doctor"] for row in a.value or ()],
        "unusable": unusable,
        "probe_failures": [
            {"probe": f"{a.kind} {a.subject}".strip(), "reason": a.problem}
            for a in answers
            if a.problem and a.kind != "implementation"
        ],
    }


def _devices(backends: list[InstalledBackend], answers: dict[str, list[Answer]]) -> list[dict[str, Any]]:
    """Every device with its facts. As in resolution the backend native to the vendor is believed first, then the first
    by name; library versions come from all that agree on what the device is."""
    found: dict[tuple[str, int], list[tuple[bool, str, dict[str, Any]]]] = {}
    for backend in backends:
        for answer in answers[backend.name]:
            for device in (answer.value or ()) if answer.kind == "devices" else ():
                facts = device["facts"]
                place = (facts["vendor"] not in backend.manifest.vendors, backend.name, facts)
                found.setdefault((answer.subject, device["index"]), []).append(place)
    devices = []
    for (type_, index), told in sorted(found.items()):
        told.sort(key=lambda place: place[:2])
        first = told[0][2]
        agreed = [facts for _, _, facts in told if (facts["vendor"], facts["arch"]) == (first["vendor"], first["arch"])]
        facts = {name: value for one in reversed(agreed) for name, value in one.items()} | first
        label = facts["vendor"] if facts["vendor"] == facts["arch"] else f"{facts['vendor']}:{facts['arch']}"
        devices.append({"device": label, "type": type_, "index": index, "facts": facts})
    return devices


def _policies(known: Known) -> list[dict[str, Any]]:
    found = []
    for name, path in shipped_policies().items():
        try:
            found.append({"name": name, "description": load_policy(name, known).description, "problem": None})
        except PolicyError as error:
            found.append({"name": name, "description": str(path), "problem": str(error)})
    return found


def _problems(data: dict[str, Any], known: Known) -> list[str]:
    problems = [f"backend {f['name']!r} of {f['distribution']} {f['version']}: {f['reason']}" for f in data["failures"]]
    for backend in data["backends"]:
        where = f"backend {backend['name']!r} of {backend['distribution']} {backend['version']}"
        problems += [f"{where}: {told}" for told in grouped(backend["unusable"].items())]
        problems += [
            f"{where}: {asked(*f['probe'].partition(' ')[::2])} {f['reason']}" for f in backend["probe_failures"]
        ]
        problems += [f"{where}: {name}: {why}" for name, why in backend["without_companion"].items()]
        problems += [
            f"{where}: {', '.join(names)}: requires {fact}, which no probe tells of any device here; a fact that is "
            "unknown is assumed to suit"
            for fact, names in backend["unknown_facts"].items()
        ]
    problems += [policy["problem"] for policy in data["policies"] if policy["problem"]]
    try:
        environment_layers(os.environ, known)
        debug_setting(os.environ)
        checking_results(os.environ)
    except PolicyError as error:
        problems.append(f"environment: {error}")
    if not data["torch"]:
        problems.append("PyTorch is not installed, and operators take its tensors: pip install torch")
    if not data["backends"]:
        problems.append("no backend is installed: pip install te-dispatch-torch")
    return problems


# -- for people ------------------------------------------------------------------------------------------------------


def _show(data: dict[str, Any], console: Console) -> None:
    torch = data["torch"] or "not installed"
    console.print(f"Python {data['python']}, te_dispatch {data['te_dispatch']}, torch {torch}")
    for name in data["torch_replaced"]:
        console.print(Text(f"  no {name}: a slower replacement serves", style="yellow"))
    console.print(Text(f"import transformer_engine: {data['transformer_engine']}\n"))
    if data["nvte_plugin"]:
        nvte_plugin.show(data["nvte_plugin"], console)
    _show_devices(data["devices"], console)
    _show_backends(data["backends"], console)
    if data["environment"]:
        console.print("[bold]Environment[/]")
        for name, value in data["environment"].items():
            console.print(Text(f"  {name}={value}"))
        for what in data["without_effect"]:
            console.print(Text(f"  {what}", style="yellow"))
        console.print()
    table = Table(title="Policies", title_justify="left", box=None, pad_edge=True)
    table.add_column("name", style="bold")
    table.add_column("description")
    for policy in data["policies"]:
        table.add_row(policy["name"], Text(policy["problem"] or policy["description"]))
    console.print(table)
    console.print()
    for backend in data["backends"]:
        for note in backend["notes"]:
            console.print(Text(f"note: backend {backend['name']!r}: {note}\n", style="yellow"))
    for note in data["misspelt_groups"]:
        console.print(Text(f"note: {note}\n", style="yellow"))
    if not data["problems"]:
        console.print("[green]Nothing is broken.[/]")
        return
    console.print(f"[bold red]{len(data['problems'])} broken:[/]")
    for problem in data["problems"]:
        console.print(Text(f"  {problem}"))
    for one in data.get("tracebacks", ()):
        console.print(Text(f"\n{one['of']}\n{one['traceback']}"))


def _show_devices(devices: list[dict[str, Any]], console: Console) -> None:
    if not devices:
        console.print("[bold]Devices[/]\n  none: no installed backend knows any device of this machine\n")
        return
    table = Table(title="Devices", title_justify="left", show_lines=True)
    for name in ("device", "name", "facts"):
        table.add_column(name, overflow="fold")
    for device in devices:
        facts = device["facts"]
        label = f"{device['device']}\n{device['type']}:{device['index']}"
        rest = {k: v for k, v in facts.items() if k not in ("type", "vendor", "arch", "name", "index")}
        table.add_row(label, str(facts["name"]), Text("\n".join(f"{k} = {_fact(k, v)}" for k, v in rest.items())))
    console.print(table)
    console.print()


def _fact(name: str, value: Any) -> str:
    if name == "memory" and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


_STATES = {"ok": "green", "warning": "yellow", "missing": "yellow"}


def _show_backends(backends: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Backends", title_justify="left", show_lines=True)
    for name in ("backend", "distribution", "native to", "implementations", "state", "its own report"):
        table.add_column(name, overflow="fold")
    for backend in backends:
        state = (
            Text("available", "green") if backend["available"] else Text(f"unavailable: {backend['reason']}", "yellow")
        )
        report = Text("\n").join(
            Text.assemble(
                (row["subject"], "bold"), " ", (row["state"], _STATES.get(row["state"], "")), f" {row['reason']}"
            )
            for row in backend["doctor"]
        )
        count = str(backend["implementations"]) + (
            f", {len(backend['unusable'])} unusable" if backend["unusable"] else ""
        )
        native = ", ".join(backend["native_to"]) or "any (portable)"
        table.add_row(backend["name"], f"{backend['distribution']} {backend['version']}", native, count, state, report)
    console.print(table)
    console.print()
