# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch explain``: who would serve a call on a device, and why the others would not."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from te_dispatch.cli.call_facts import read_facts
from te_dispatch.cli.console import FOUND, emit, out
from te_dispatch.cli.devices import HERE, find_device
from te_dispatch.cli.ops import find_operator
from te_dispatch.core.decision import Accepted, Decision
from te_dispatch.core.eligibility import ELSEWHERE
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.core.policy import COMPOSITE
from te_dispatch.core.resolve import resolve
from te_dispatch.core.scopes import MANAGER


def explain(operator_name: str, given: Sequence[str], device: str | None, policy: str | None, as_json: bool) -> int:
    """Resolve a described call and show the whole decision.

    Args:
        operator_name: the operator.
        given: ``fact=value`` each, as for `read_facts`.
        device: as for `find_device`; None is this machine's.
        policy: a shipped policy or a file, put on top of those in force.

    Returns:
        0, or 1 where nothing serves the call.
    """
    operator = find_operator(operator_name)
    facts = read_facts(operator, given, MANAGER.known().dtypes)
    with MANAGER.policy(policy) if policy else contextlib.nullcontext():
        effective = MANAGER.capture().policy
    found = find_device(device or HERE)
    decision = resolve(operator, facts, found, effective, MANAGER.snapshot)
    unknown = _unknown(operator, decision)
    if as_json:
        emit({**decision.as_data(), "unknown": unknown})
    else:
        show(decision, unknown, out())
    return 0 if decision.chosen else FOUND


def _unknown(operator: Operator, decision: Decision) -> list[str]:
    """Facts of the call that were left open."""
    return [name for name in operator.facts if name not in decision.call and not name.endswith(".default")]


def show(decision: Decision, unknown: Sequence[str], console: Console) -> None:
    """Print a decision as tables and trees."""
    console.print(_heading(decision))
    if unknown:
        console.print(Text(f"unknown, so assumed to suit: {', '.join(unknown)}", "dim"))
    if decision.rule:
        console.print(Text(f"order set by the rule at {decision.rule}"))
    console.print(_table(decision))
    for candidate in decision.accepted:
        if candidate.pieces:
            console.print(tree(candidate))
    if decision.tie:
        tied = " and ".join(decision.tie)
        console.print(Text(f"tie: {tied} are equally placed, the name decided; {decision.cure_of_tie()}", "yellow"))
    for assumption in decision.chosen.assumed if decision.chosen else ():
        if assumption.startswith(ELSEWHERE):
            console.print(Text(f"the choice assumes: {assumption}", "yellow"))
    for name in _without_forward(decision):
        told = f"{name}: no forward is bound with it while its own backend's {decision.operator} takes the call"
        console.print(Text(told, "yellow"))
    if decision.chosen is None:
        console.print(Text("Nothing serves this call.", "bold red"))


def _without_forward(decision: Decision) -> list[str]:
    """Backwards that could serve the call and belong to no forward, neither of their own backend nor another's."""
    operator = OPERATORS[decision.operator]
    if operator.companion is None or not operator.backward:
        return []
    return [one.id for one in decision.accepted if one.companion is None and not one.id.startswith(f"{COMPOSITE}.")]


def _heading(decision: Decision) -> Text:
    facts = ", ".join(
        f"{name}={value}"
        for name, value in sorted(decision.call.items())
        if value not in (None, False, "none") and not name.endswith(".default")
    )
    return Text.assemble(
        (f"{decision.operator}@{decision.operator_version}", "bold"),
        f" on {_device(decision.device)}, policy {decision.policy}\n",
        facts or "no fact given",
    )


def _device(device: DeviceFacts) -> str:
    return f"{device.label()} ({'described' if device.described else device.type})"


def _table(decision: Decision) -> Table:
    rows: list[tuple[str | Text, ...]] = []
    for position, one in enumerate(decision.accepted, 1):
        verdict = Text("chosen", "bold green") if position == 1 else Text("accepts", "green")
        where = str(one.origin) if one.origin else ""
        assumed = Text("\n".join(dict.fromkeys(one.assumed)))
        rows.append((str(position), one.id, verdict, Text(one.place), Text(where), one.companion or "", assumed))
    for other in decision.rejected:
        where = f"{other.where} ({other.origin})" if other.origin else other.where
        rejected = Text("rejected", "red")
        rows.append(("", Text(other.id, "dim"), rejected, Text(other.reason), Text(where), "", ""))
    if not rows:
        rows.append(("", "", Text("none", "red"), "no installed backend implements it", "", "", ""))
    columns = ("", "candidate", "verdict", "reason", "where", "companion", "assumed")
    # Width is scarce: what no candidate has gets no column.
    shown = [i for i, name in enumerate(columns) if name in columns[:5] or any(len(row[i]) for row in rows)]
    table = Table()
    for i in shown:
        table.add_column(columns[i], overflow="fold")
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table


def tree(candidate: Accepted) -> Tree:
    """A composite with its pieces, down to implementations."""
    root = Tree(Text(candidate.id, "cyan"))
    _grow(root, candidate)
    return root


def _grow(node: Tree, candidate: Accepted) -> None:
    for name, piece in candidate.pieces.items():
        chosen = piece.chosen
        label = chosen.id if chosen else "nothing"
        style = "cyan" if label.startswith(f"{COMPOSITE}.") else "green"
        branch = node.add(Text.assemble((name, "bold"), f": {piece.operator} -> ", (label, style)))
        if chosen is not None:
            _grow(branch, chosen)
