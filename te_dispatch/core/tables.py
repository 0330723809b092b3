# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The lookup that a keyed call makes: from the facts that matter to the bound implementation, in nanoseconds.

Every way of reading a tensor costs (a dtype 40 ns, a `torch.device` 55 and 20 more to hash, a shape 80), so a lookup
reads each fact once, in nested steps, and reads the device as a boolean (``is_cuda``) where the process holds one kind
of accelerator. Where a step finds nothing, its default leads to `miss`, which resolves; there is no test for None in
between. Measurements behind this: ``benchmarks/dispatch_overhead.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from te_dispatch.core.operator import Operator
from te_dispatch.core.requirements import Compare, MultipleOf

Atom = tuple[str, object]
Function = Callable[..., Any]

_serial = itertools.count()

#: How a process tells its devices apart, see `Table`.
NO_DEVICE = ""
CPU_ONLY = "cpu"
ANY = "any"


def atom_expression(operator: Operator, atom: Atom) -> str:
    """Source that reads a fact, or the truth of a condition on it."""
    name, condition = atom
    expression = operator.facts[name].expression
    if isinstance(condition, (Compare, MultipleOf)):
        return f"({condition.expression(expression)})"
    return expression


class _Dict:
    """One step keyed by value."""

    def __init__(self, expression: str) -> None:
        self.expression = expression

    def lookup(self, node: str, default: str) -> str:
        return f"{node}.get({self.expression}, {default})"

    def make(self, default: Any) -> dict[Any, Any]:
        return {}

    def child(self, node: Any, value: Any, make: Callable[[], Any]) -> Any:
        if value not in node:
            node[value] = make()
        return node[value]

    def put(self, node: Any, value: Any, function: Function) -> None:
        node[value] = function


class _Truth(_Dict):
    """One step by the truth of a condition: indexing a list of two is cheaper than hashing."""

    def lookup(self, node: str, default: str) -> str:
        return f"{node}[1 if {self.expression} else 0]"  # a bool as an index is slow

    def make(self, default: Any) -> Any:
        return [default, default]

    def child(self, node: Any, value: Any, make: Callable[[], Any]) -> Any:
        if node[value] is self.default:
            node[value] = make()
        return node[value]

    default: Any = None


class Table:
    """The lookup of one operator for a set of atoms.

    Args:
        operator: its expressions are read.
        atoms: facts and conditions of the key.
        devices: `NO_DEVICE` (the device cannot matter), `CPU_ONLY`, `ANY`, or the name of an attribute that is True
            for tensors of the process's one kind of accelerator (``is_cuda``).
        miss: what an unknown key is given to.
    """

    def __init__(self, operator: Operator, atoms: Sequence[Atom], devices: str, miss: Function) -> None:
        self.operator = operator
        self.atoms = tuple(atoms)
        self.devices = devices
        self.miss = miss
        self.serial = next(_serial)
        self.steps: list[_Dict] = []
        dtypes = [a for a in self.atoms if a[1] is None and operator.facts[a[0]].kind == "dtype"]
        options = [a for a in self.atoms if a[1] is None and operator.facts[a[0]].kind != "dtype"]
        truths = [a for a in self.atoms if a[1] is not None]
        self._order: list[list[Atom]] = []
        for atom in dtypes:
            self.steps.append(_Dict(atom_expression(operator, atom)))
            self._order.append([atom])
        if options:
            texts = [atom_expression(operator, atom) for atom in options]
            self.steps.append(_Dict(texts[0] if len(texts) == 1 else f"({', '.join(texts)})"))
            self._order.append(options)
        for atom in truths:
            self.steps.append(_Truth(atom_expression(operator, atom)))
            self._order.append([atom])
        # Defaults from the last step backwards: a missing entry of one step is an empty node of the next.
        self.defaults: list[Any] = [miss]
        for step in reversed(self.steps):
            node = step.make(self.defaults[0])
            if isinstance(step, _Truth):
                step.default = self.defaults[0]
            self.defaults.insert(0, node)
        self.roots: dict[str, Any] = {name: self._node(0) for name in self._root_names()}

    def _root_names(self) -> list[str]:
        if self.devices in (NO_DEVICE, CPU_ONLY):
            return ["_host"]
        return ["_any"] if self.devices == ANY else ["_host", "_accelerator"]

    def _node(self, level: int) -> Any:
        if level == len(self.steps):
            return self.miss
        return self.steps[level].make(self.defaults[level + 1])

    def insert(self, device: Any, values: Sequence[Any], function: Function) -> None:
        """Let calls with these raw atom values (in the order of `atoms`) on `device` go to `function`."""
        by_atom = dict(zip(self.atoms, values))
        keys = [
            by_atom[group[0]] if len(group) == 1 else tuple(by_atom[atom] for atom in group) for group in self._order
        ]
        if self.devices == ANY:
            root = self.roots["_any"]
            if not keys:
                root[device] = function
                return
            node = root.setdefault(device, self._node(0))
        else:
            name = "_host" if self.devices in (NO_DEVICE, CPU_ONLY) or device.type == "cpu" else "_accelerator"
            if not keys:
                self.roots[name] = function
                return
            node = self.roots[name]
        for level, key in enumerate(keys[:-1]):
            node = self.steps[level].child(node, key, functools.partial(self._node, level + 1))
        self.steps[len(keys) - 1].put(node, keys[-1], function)

    def variables(self) -> dict[str, Any]:
        """What the names in `body` stand for."""
        found = {f"_default{level}": node for level, node in enumerate(self.defaults)}
        return {**found, **self.roots, "_miss": self.miss}

    def body(self, arguments: str, indent: str, prefix: str = "") -> str:
        """Source of the lookup and call; variable names carry `prefix`."""
        base = self.operator.device.removesuffix(".device")

        def found(root: str) -> str:
            text, first = f"{prefix}{root}", 0
            if self.devices == ANY:
                text = f"{prefix}{root}.get({base}.device, {prefix}_default0)"
            for level, step in enumerate(self.steps[first:]):
                text = step.lookup(text, f"{prefix}_default{level + 1}")
            return f"return {text}({arguments})\n"

        if self.devices == NO_DEVICE:
            return f"{indent}{found('_host')}"
        # Fake tensors imitate a device; their class tells them apart. Meta tensors are on neither device.
        lines = f"{indent}if {base}.__class__ in _REAL:\n"
        if self.devices == ANY:
            lines += f"{indent}    {found('_any')}"
        else:
            if self.devices != CPU_ONLY:
                lines += f"{indent}    if {base}.{self.devices}:\n{indent}        {found('_accelerator')}"
            lines += f"{indent}    if {base}.is_cpu:\n{indent}        {found('_host')}"
        return lines + f"{indent}return {prefix}_miss({arguments})\n"
