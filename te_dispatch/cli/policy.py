# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch policy``: check, show, schema, list."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

import te_dispatch.ops  # noqa: F401  # before scopes
from te_dispatch.cli.console import emit, out
from te_dispatch.core.policy import Policy
from te_dispatch.core.policy.file import effective_with_origins, json_schema, load_policy
from te_dispatch.core.scopes import MANAGER
from te_dispatch.core.shipped import shipped_policies


def check(file: str, as_json: bool) -> int:
    """Read a policy file with all it includes.

    Raises:
        PolicyError: ``file:line:column: what is wrong``.
    """
    policy = load_policy(file, MANAGER.known())
    absent = sorted(_named(policy) - set(MANAGER.snapshot.backends))
    if as_json:
        emit({"ok": True, "file": file, "name": policy.name, "absent_backends": absent, "policy": policy.as_data()})
        return 0
    rules = len(policy.rules)
    out().print(Text(f"{file}: OK, {rules} rule{'' if rules == 1 else 's'}, digest {policy.digest()}"))
    if absent:
        for name in absent:
            out().print(Text(f"{name} is skipped here: {MANAGER.snapshot.absence(name)}"))
    return 0


def _named(policy: Policy) -> set[str]:
    """Backends that a policy names."""
    groups: list[Any] = [policy.prefer, policy.allow or (), policy.deny, *policy.require]
    for rule in policy.rules:
        groups += [rule.prefer, rule.allow or (), rule.deny, rule.require]
    shadowed = {policy.shadow.against} if policy.shadow is not None and policy.shadow.active else set()
    names = {s.text.partition(".")[0] for group in groups for s in group if not s.text.startswith("trait:")}
    return (names | shadowed) - {"native", "composite"}


def show(policy: str | None, origin: bool, as_json: bool) -> int:
    """The effective policy: of this process's environment, with `policy` as its strongest layer if one is named."""
    if policy is None:
        effective = MANAGER.capture().policy
    else:
        with MANAGER.policy(policy):
            effective = MANAGER.capture().policy
    if as_json:
        lines = [{"key": key, "value": value, "origin": str(o)} for key, value, o in effective_with_origins(effective)]
        emit({"name": effective.name, "digest": effective.digest(), "policy": effective.as_data(), "origins": lines})
        return 0
    table = Table(title=Text(f"{effective.name} (digest {effective.digest()})"), title_justify="left")
    for column in ("key", "value", *(("from",) if origin else ())):
        table.add_column(column, overflow="fold")
    for key, value, where in effective_with_origins(effective):
        table.add_row(Text(key), Text(str(value)), *((Text(str(where)),) if origin else ()))
    out().print(table)
    return 0


def schema() -> int:
    """The JSON Schema of policy files, for editors."""
    emit(json_schema())
    return 0


def listing(as_json: bool) -> int:
    """The policies that ship."""
    found = [
        {"name": name, "description": load_policy(name, MANAGER.known()).description, "file": str(path)}
        for name, path in shipped_policies().items()
    ]
    if as_json:
        emit({"policies": found})
        return 0
    table = Table(box=None)
    table.add_column("name", style="bold")
    table.add_column("description")
    for entry in found:
        table.add_row(entry["name"], Text(entry["description"]))
    out().print(table)
    return 0
