# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch ops``: which backend implements which operator on a device, and what an operator's contract is."""

from __future__ import annotations

import inspect
from typing import Any

from rich.table import Table
from rich.text import Text

from te_dispatch.cli.console import CommandError, emit, out
from te_dispatch.cli.devices import find_device
from te_dispatch.core.facts import CallFacts, DeviceFacts, FactValue
from te_dispatch.core.memory import FORMS
from te_dispatch.core.operator import OPERATORS, Fact, Operator
from te_dispatch.core.policy import COMPOSITE, Policy
from te_dispatch.core.policy.known import did_you_mean
from te_dispatch.core.requirements import DEVICE_PREFIX
from te_dispatch.core.resolve import resolve
from te_dispatch.core.scopes import MANAGER
from te_dispatch.core.snapshot import Snapshot

IMPLEMENTED, EMULATED, COMPOSITE_ONLY, MISSING = "implemented", "emulated", "composite only", "missing"
REJECTED = "rejected"
_COLOURS = {IMPLEMENTED: "green", EMULATED: "yellow", COMPOSITE_ONLY: "cyan", MISSING: "red"}


def find_operator(name: str) -> Operator:
    """An operator by name.

    Raises:
        CommandError: there is none; names the nearest.
    """
    found = OPERATORS.get(name)
    if found is None:
        raise CommandError(f"{name!r} is no operator{did_you_mean(name, OPERATORS)}")
    return found


# -- the matrix ------------------------------------------------------------------------------------------------------


def matrix(family: str | None, device: str | None, as_json: bool) -> int:
    """Operators x backends.

    Args:
        family: only these operators.
        device: as for `find_device`; None asks what the manifests declare for any device at all.
    """
    families = {operator.family for operator in OPERATORS.values()}
    if family is not None and family not in families:
        raise CommandError(f"--family: {family!r} is no family{did_you_mean(family, families)}")
    facts = None if device is None else find_device(device)
    snapshot = MANAGER.snapshot
    rows = [row(o, facts, snapshot) for o in OPERATORS.values() if family in (None, o.family)]
    if as_json:
        emit({"device": facts.label() if facts else None, "backends": list(snapshot.backends), "operators": rows})
    else:
        _show_matrix(rows, facts, snapshot)
    return 0


def row(operator: Operator, device: DeviceFacts | None, snapshot: Snapshot) -> dict[str, Any]:
    """One operator: the state of each backend, and what they add up to.

    On a device an implementation counts if the device alone does not rule it out; what a particular call needs is
    ``explain``'s business. Policies are left out of it.
    """
    cells = {name: _cell(operator, name, device, snapshot) for name in snapshot.backends}
    states = {cell["state"] for cell in cells.values()}
    composites = _composites(operator, device, snapshot)
    if IMPLEMENTED in states:
        state = IMPLEMENTED
    elif EMULATED in states:
        state = EMULATED
    else:
        state = COMPOSITE_ONLY if composites else MISSING
    return {
        "name": operator.name,
        "version": operator.version,
        "family": operator.family,
        "state": state,
        "backends": cells,
        "composites": composites,
    }


def _cell(operator: Operator, backend_name: str, device: DeviceFacts | None, snapshot: Snapshot) -> dict[str, Any]:
    names: dict[str, list[str]] = {IMPLEMENTED: [], EMULATED: []}
    rejected: dict[str, str] = {}
    for backend, implementation in snapshot.candidates(operator.name):
        if backend.name != backend_name:
            continue
        candidate = f"{backend.name}.{implementation.name}"
        reason = _ruled_out(candidate, device, snapshot)
        if reason is not None:
            rejected[candidate] = reason
        else:
            names[EMULATED if "emulated" in implementation.traits else IMPLEMENTED].append(candidate)
    state = next((s for s in (IMPLEMENTED, EMULATED) if names[s]), REJECTED if rejected else MISSING)
    return {"state": state, "implementations": names[IMPLEMENTED] + names[EMULATED], "rejected": rejected}


def _ruled_out(candidate: str, device: DeviceFacts | None, snapshot: Snapshot) -> str | None:
    """Why an implementation can serve no call on the device; None if it may."""
    if candidate in snapshot.unusable:
        return snapshot.unusable[candidate]
    backend, implementation = snapshot.implementation(candidate)
    if device is None:
        return None
    # A described device is somewhere else: what this machine lacks says nothing about it.
    if backend.name in snapshot.unavailable and not device.described:
        return snapshot.unavailable[backend.name]
    for condition in implementation.requires:
        if all(name.startswith(DEVICE_PREFIX) for name in condition.reads()):
            verdict = condition.check({}, device)
            if verdict.holds is False:
                return verdict.reason
    return None


def _composites(operator: Operator, device: DeviceFacts | None, snapshot: Snapshot) -> list[str]:
    """Decompositions whose pieces can all be had. Which call a decomposition applies to is its own secret, so a few
    typical ones are tried: nothing known, nothing optional given, everything optional given, all options plain."""
    place = device or DeviceFacts(type="any", vendor="any", arch="any")
    found: dict[str, None] = {}
    defaults = operator.default_facts()
    given = {name: True for name, fact in operator.facts.items() if fact.presence}
    calls: list[CallFacts] = [{}, defaults, {**defaults, **given}, _plain(operator)]
    calls += [*_quantizing(operator), *_options(operator)]
    for call in calls:
        # Nothing to catch: a decomposition answers whatever is unknown, so one that raises is a defect to be seen.
        decision = resolve(operator, call, place, Policy(), snapshot)
        found |= {a.id: None for a in decision.accepted if a.id.startswith(f"{COMPOSITE}.")}
    return list(found)


def _plain(operator: Operator) -> CallFacts:
    """A call on operands that are not quantized, with the first word of every option that has no default."""
    plain: dict[str, FactValue] = {}
    for name, fact in operator.facts.items():
        if fact.words:
            plain[name] = fact.words[0]
        elif fact.kind == "dtype":
            plain[name] = "bf16"
    return {**plain, **operator.default_facts()}


def _quantizing(operator: Operator) -> list[CallFacts]:
    """Calls with a quantizer for the output."""
    names = [name for name in operator.facts if name.endswith("quantizer")]
    return [{name: "current", f"{name}.encoding": "e4m3fn", f"{name}.scaling": "tensor"} for name in names]


def _options(operator: Operator) -> list[CallFacts]:
    return [{"epilogue": e, "bias": True} for e in ("gelu", "dgelu")] if "epilogue" in operator.facts else []


def _show_matrix(rows: list[dict[str, Any]], device: DeviceFacts | None, snapshot: Snapshot) -> None:
    where = f"on {device.label()}" if device else "on any device"
    table = Table(title=f"Operators {where}", title_justify="left")
    table.add_column("family")
    table.add_column("operator", style="bold")
    for name in snapshot.backends:
        table.add_column(name)
    table.add_column("composites")
    table.add_column("state")
    previous = None
    for line in rows:
        if previous not in (None, line["family"]):
            table.add_section()
        family, previous = "" if line["family"] == previous else line["family"], line["family"]
        cells = [_shown_cell(line["backends"][name]) for name in snapshot.backends]
        composites = "\n".join(name.partition(".")[2] for name in line["composites"])
        table.add_row(family, line["name"], *cells, composites, Text(line["state"], _COLOURS[line["state"]]))
    console = out()
    console.print(table)
    if not snapshot.backends:
        console.print("No backend is installed: pip install te-dispatch-torch")


def _shown_cell(cell: dict[str, Any]) -> Text:
    if cell["implementations"]:
        names = "\n".join(name.partition(".")[2] for name in cell["implementations"])
        return Text(names + (" (emulated)" if cell["state"] == EMULATED else ""), _COLOURS[cell["state"]])
    if cell["rejected"]:
        return Text("; ".join(dict.fromkeys(cell["rejected"].values())), "dim")
    return Text("-", "dim")


# -- one operator ----------------------------------------------------------------------------------------------------


def contract(name: str, as_json: bool) -> int:
    """Signature, contract, and the facts that policies and requirements can read."""
    operator = find_operator(name)
    data = {
        "name": operator.name,
        "version": operator.version,
        "family": operator.family,
        "signature": signature(operator),
        "doc": operator.doc,
        "companion": operator.companion,
        "backward": operator.backward,
        "operands": [{"name": n, "memory": form, "allows": FORMS[form]} for n, form in operator.memory.items()],
        "facts": [
            {"name": f.name, "kind": f.kind, "doc": _describe(f), "words": list(f.words)}
            for f in operator.facts.values()
            if _told(f)
        ],
        "implementations": [
            {
                "id": f"{b.name}.{i.name}",
                "requires": [c.describe() for c in i.requires],
                "claims": sorted(i.claims),
                "traits": sorted(i.traits),
            }
            for b, i in MANAGER.snapshot.candidates(name)
        ],
        "decompositions": [f"{COMPOSITE}.{d.name}" for d in operator.decompositions],
    }
    if as_json:
        emit(data)
    else:
        _show_contract(data)
    return 0


def signature(operator: Operator) -> str:
    """As one would write it, one parameter per line where it is long."""
    parameters = [_parameter(p) for p in operator.signature.parameters.values()]
    stars = [i for i, p in enumerate(operator.signature.parameters.values()) if p.kind is p.KEYWORD_ONLY]
    if stars:
        parameters.insert(stars[0], "*")
    returns = operator.signature.return_annotation
    ending = "" if returns is inspect.Signature.empty else f" -> {returns}"
    line = f"{operator.name}({', '.join(parameters)}){ending}"
    if len(line) <= 100:
        return line
    return f"{operator.name}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){ending}"


def _parameter(parameter: inspect.Parameter) -> str:
    # Annotations are strings in the stubs; str(parameter) would quote them.
    default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
    return f"{parameter.name}: {parameter.annotation}{default}"


def _told(fact: Fact) -> bool:
    # Whether a newer keyword is at its default concerns old plugins, not policies.
    return not fact.name.endswith(".default")


def _describe(fact: Fact) -> str:
    """What a fact is; one without a description shows how it is computed."""
    expression = fact.expression
    enclosed = expression.startswith("(") and expression.endswith(")") and _closes_at(expression) == len(expression) - 1
    return fact.doc or (expression[1:-1] if enclosed else expression)


def _closes_at(expression: str) -> int:
    """Where the parenthesis that an expression begins with is closed."""
    depth = 0
    for position, character in enumerate(expression):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position
    return -1


def _show_contract(data: dict[str, Any]) -> None:
    console = out()
    console.print(Text(f"{data['name']}@{data['version']}, family {data['family']}", "bold"))
    if data["companion"]:
        console.print(f"{'backward' if data['backward'] else 'forward'} of the companion {data['companion']}")
    console.print(Text(f"\n{data['signature']}\n\n{data['doc']}\n"))
    operands = Table(title="Memory of operands", title_justify="left")
    for column in ("operand", "form", "what it may look like"):
        operands.add_column(column)
    for one in data["operands"]:
        operands.add_row(one["name"], one["memory"], Text(one["allows"]))
    console.print(operands)
    facts = Table(title="Facts", title_justify="left")
    for column in ("fact", "kind", "what it is"):
        facts.add_column(column)
    for fact in data["facts"]:
        words = f": {', '.join(fact['words'])}" if fact["words"] else ""
        facts.add_row(fact["name"], fact["kind"], Text(fact["doc"] + words))
    console.print(facts)
    table = Table(title="Implementations", title_justify="left")
    for column in ("id", "requires", "claims", "traits"):
        table.add_column(column, overflow="fold")
    for one in data["implementations"]:
        requires = Text("\n".join(one["requires"]) or "nothing")
        table.add_row(one["id"], requires, ", ".join(one["claims"]), ", ".join(one["traits"]))
    for name in data["decompositions"]:
        table.add_row(name, "its pieces", "", "")
    console.print(table)
