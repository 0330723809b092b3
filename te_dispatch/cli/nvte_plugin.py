# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What ``te-dispatch doctor`` tells of operators inside an installed Transformer Engine (docs/nvte_plugin.md)."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.text import Text

from te_dispatch.compat.alias import found as find_transformer_engine
from te_dispatch.compat.nvte_plugin.manifest import MANIFEST, SERVED, PassedOn
from te_dispatch.core.nvte_variables import PLUGIN
from te_dispatch.core.probing import run_probes


def examine(time_limit: float) -> dict[str, Any] | None:
    """Whether Transformer Engine, as a program of this environment imports it, uses functions of this project.

    Returns:
        None where that is no question: no Transformer Engine is installed, and the variable does not name this plugin.
        Otherwise ``in_use``; ``reason``, a sentence; ``problem``, what is broken or None; ``functions``, each served
        function with its ``operator``, the calls that it ``passes_on``, and where it was ``found``; ``passed_on``, the
        others with the reason; and the ``traceback`` of what went wrong.
    """
    there = find_transformer_engine()
    installed = there is not None and not there[1]
    named = os.environ.get("NVTE_PLUGIN", "").strip()
    if named != PLUGIN:
        if not installed:
            return None
        other = (
            f"NVTE_PLUGIN={named} names another plugin" if named else f"NVTE_PLUGIN={PLUGIN} has it call te_dispatch"
        )
        return _told(False, f"Transformer Engine does not call te_dispatch: {other}")
    if not installed:
        where = "te_dispatch stands in for it" if there else "it is not installed"
        return _told(False, f"NVTE_PLUGIN={PLUGIN} concerns Transformer Engine itself, and {where}")
    (answer,) = run_probes([("doctor", "", f"{PLUGIN}.proof:rows")], time_limit)
    rows = answer.value or []
    if answer.problem or not rows or any(state != "ok" for _, state, _ in rows):
        why = answer.problem or "; ".join(reason for _, state, reason in rows if state != "ok")
        problem = f"NVTE_PLUGIN={PLUGIN}: importing Transformer Engine to look at its functions: {why}"
        return _told(False, why, problem, traceback=answer.traceback)
    (_, _, whole), *functions = rows
    found = {name: reason for name, _, reason in functions}
    return _told(True, f"{len(found)} of {len(MANIFEST)} native functions are {whole}", found=found)


def _told(
    in_use: bool, reason: str, problem: str | None = None, found: dict[str, str] | None = None, traceback: str = ""
) -> dict[str, Any]:
    return {
        "in_use": in_use,
        "reason": reason,
        "problem": problem,
        "functions": {
            name: {"operator": entry.operator, "passes_on": entry.passes_on, "found": (found or {}).get(name)}
            for name, entry in SERVED.items()
        },
        "passed_on": {name: entry.reason for name, entry in MANIFEST.items() if isinstance(entry, PassedOn)},
        "traceback": traceback,
    }


def show(data: dict[str, Any], console: Console) -> None:
    """For people: the sentence, and where functions are in use their names."""
    console.print("[bold]Operators inside Transformer Engine[/]")
    console.print(Text(f"  {data['reason']}", style="green" if data["in_use"] else "yellow"))
    if data["in_use"]:
        console.print(Text("  " + ", ".join(data["functions"])))
    console.print()
