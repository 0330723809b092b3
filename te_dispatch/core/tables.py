# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The lookup that a keyed call makes: from the facts that matter to the bound implementation, in nanoseconds.

Every way of reading a tensor costs (a dtype or ``is_cuda`` 40 ns, a `torch.device` 55 and 20 more to hash, a shape 80),
so a lookup reads each fact once, into a local variable, and reads the device as a boolean (``is_cuda``) where the
process holds one kind of accelerator. Then, for the facts that are compared by value, there are two ways:

- *by identity*: the values of the first different calls are compared with ``is``. Where all are the same objects, what
  follows is a branch on a condition (``k % 16 == 0``) whose ends are variables of their own.
- *by value*: everything else goes through nested dicts, and lists of two for conditions. Where a step finds nothing,
  its default leads to `miss`, which resolves; there is no test for None in between.

Both ways end at the same functions: identical values are equal ones, so the first is only a shortcut of the second.
It knows the first calls rather than the last one: a call that is found writes nothing, so threads share it without a
race, and calls of two kinds that alternate are both fast.

Measurements behind this: ``docs/hot_path.md`` and ``benchmarks/dispatch_overhead.py``.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from types import CodeType
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

#: How many different combinations of values are compared by identity. Each saves its own calls 40 to 60 ns, costs all
#: later ones 8, and lengthens the generated code.
_KNOWN = 2
#: Conditions that become branches after such a comparison; the ends double with each, so the others index lists.
_BRANCHED = 1
#: What an identity is compared with before there is a call to know: identical to no value of a fact.
_NOTHING = object()


def atom_expression(operator: Operator, atom: Atom) -> str:
    """Source that reads a fact, or the truth of a condition on it."""
    name, condition = atom
    return _truth(condition, operator.facts[name].expression)


def _truth(condition: object, expression: str) -> str:
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

    Attributes:
        variables: what the names in `body` stand for. Generated code holds copies, which `copy_to` keeps current.
        code: of a trampoline that makes the lookup itself, once there is one.
    """

    def __init__(self, operator: Operator, atoms: Sequence[Atom], devices: str, miss: Function) -> None:
        self.operator = operator
        self.atoms = tuple(atoms)
        self.devices = devices
        self.miss = miss
        self.serial = next(_serial)
        self.code: CodeType | None = None
        dtypes = [a for a in self.atoms if a[1] is None and operator.facts[a[0]].kind == "dtype"]
        options = [a for a in self.atoms if a[1] is None and operator.facts[a[0]].kind != "dtype"]
        self._values = [*dtypes, *options]
        self._truths = [a for a in self.atoms if a[1] is not None]
        self._reads, texts = self._read()
        # One step for each dtype, one for all options, one for each condition.
        self._order = [[a] for a in dtypes] + ([options] if options else []) + [[a] for a in self._truths]
        self._first_truth = len(self._order) - len(self._truths)
        self._steps: list[_Dict] = []
        for group in self._order:
            read = [texts[atom] for atom in group]
            step = _Dict if group[0][1] is None else _Truth
            self._steps.append(step(read[0] if len(read) == 1 else f"({', '.join(read)})"))
        # Defaults from the last step backwards: a missing entry of one step is an empty node of the next.
        self._defaults: list[Any] = [miss]
        for made in reversed(self._steps):
            node = made.make(self._defaults[0])
            if isinstance(made, _Truth):
                made.default = self._defaults[0]
            self._defaults.insert(0, node)
        #: root -> the combinations of values that are compared by identity
        self._known: dict[str, list[tuple[Any, ...]]] = {root: [] for root in self._roots()}
        self._copies: list[Callable[[str, Any], None]] = []
        self.variables = self._initial()

    # -- contents -------------------------------------------------------------------------------------------------

    def _roots(self) -> list[str]:
        if self.devices in (NO_DEVICE, CPU_ONLY):
            return ["_host"]
        return ["_any"] if self.devices == ANY else ["_host", "_accelerator"]

    def _initial(self) -> dict[str, Any]:
        found = {f"_default{level}": node for level, node in enumerate(self._defaults)}
        torch = sys.modules.get("torch")
        found.update(_miss=self.miss, _tensor=None if torch is None else torch.Tensor)
        for root in self._roots():
            found[root] = {} if self.devices == ANY else self._node(0)
            if self._shortened(root):
                depth = min(len(self._truths), _BRANCHED)
                for known in range(self._room):
                    for bits in itertools.product("01", repeat=depth):
                        found[f"{root}{known}_to{''.join(bits)}"] = self._defaults[self._first_truth + depth]
                    found.update({f"{root}{known}_is{i}": _NOTHING for i in range(len(self._values))})
        return found

    def _shortened(self, root: str) -> bool:
        """Whether there is a comparison by identity: not for a `torch.device`, which every read makes anew."""
        return root != "_any" and bool(self._steps)

    @property
    def _room(self) -> int:
        return _KNOWN if self._values else 1

    def _node(self, level: int) -> Any:
        if level == len(self._steps):
            return self.miss
        return self._steps[level].make(self._defaults[level + 1])

    def copy_to(self, copy: Callable[[str, Any], None]) -> None:
        """Give `copy` every variable now, and each one that changes from now on."""
        for name, value in self.variables.items():
            copy(name, value)
        self._copies.append(copy)

    def _set(self, name: str, value: Any) -> None:
        self.variables[name] = value
        for copy in self._copies:
            copy(name, value)

    def insert(self, device: Any, values: Sequence[Any], function: Function) -> None:
        """Let calls with these raw atom values (in the order of `atoms`) on `device` go to `function`."""
        by_atom = dict(zip(self.atoms, values))
        keys = [
            by_atom[group[0]] if len(group) == 1 else tuple(by_atom[atom] for atom in group) for group in self._order
        ]
        if self.devices == ANY:
            root = "_any"
            if not keys:
                self.variables[root][device] = function
                return
            node = self.variables[root].setdefault(device, self._node(0))
        else:
            on_host = self.devices in (NO_DEVICE, CPU_ONLY) or device.type == "cpu"
            root = "_host" if on_host else "_accelerator"
            if not keys:
                self._set(root, function)
                return
            node = self.variables[root]
        path = [node]
        for level, key in enumerate(keys[:-1]):
            path.append(self._steps[level].child(path[-1], key, functools.partial(self._node, level + 1)))
        self._steps[-1].put(path[-1], keys[-1], function)
        if self._shortened(root):
            self._shorten(root, by_atom, [*path, function])

    def _shorten(self, root: str, by_atom: dict[Atom, Any], path: list[Any]) -> None:
        """Let the comparison by identity lead where the path leads, if it knows these values or has room for them."""
        values = tuple(by_atom[atom] for atom in self._values)
        combinations = self._known[root]
        new = values not in combinations
        if new:
            if len(combinations) == self._room:
                return
            combinations.append(values)
        name = f"{root}{combinations.index(values)}"
        branches = self._truths[:_BRANCHED]
        bits = "".join("1" if by_atom[atom] else "0" for atom in branches)
        # The end before the values that lead to it: a thread that finds all of them identical finds the end too.
        self._set(f"{name}_to{bits}", path[self._first_truth + len(branches)])
        if new:
            for i, value in enumerate(values):
                self._set(f"{name}_is{i}", value)

    # -- source ---------------------------------------------------------------------------------------------------

    @property
    def _operand(self) -> str:
        """The argument that says on which device a call is."""
        return self.operator.device.removesuffix(".device")

    def _read(self) -> tuple[list[str], dict[Atom, str]]:
        """Statements that read facts into local variables, and what then stands for each atom."""
        lines, texts = [], {}
        for i, atom in enumerate(self._values):
            lines.append(f"_value{i} = {atom_expression(self.operator, atom)}")
            texts[atom] = f"_value{i}"
        names = [name for name, _ in self._truths]
        expressions = {name: self.operator.facts[name].expression for name in names}
        # A shape costs more than all that is done with it: once for the operand that every call has.
        shape = re.compile(rf"(?<![\w.]){self._operand}\.shape\b") if self._operand.isidentifier() else None
        if shape is not None and sum(len(shape.findall(e)) for e in expressions.values()) > 1:
            lines.append(f"_shape = {self._operand}.shape")
            expressions = {name: shape.sub("_shape", e) for name, e in expressions.items()}
        for i, name in enumerate(expressions):
            if names.count(name) > 1:
                lines.append(f"_size{i} = {expressions[name]}")
                expressions[name] = f"_size{i}"
        texts.update({atom: _truth(atom[1], expressions[atom[0]]) for atom in self._truths})
        return lines, texts

    def body(self, arguments: str, indent: str, prefix: str = "") -> str:
        """Source of the lookup and call; variable names carry `prefix`."""
        if self.devices == NO_DEVICE:
            return self._lookup("_host", arguments, indent, prefix)
        operand, deeper = self._operand, indent + " " * 4
        # Fake tensors imitate a device; their class tells them apart, also in a record, which has data in either
        # direction or in both. Meta tensors are on neither device.
        tensor = f"__class__ is {prefix}_tensor"
        record = f"{operand}.__class__ is _Record and ({operand}.row_data.{tensor} or {operand}.col_data.{tensor})"
        source = f"{indent}if {operand}.{tensor} or {operand}.__class__ in _REAL or {record}:\n"
        if self.devices == ANY:
            source += self._lookup("_any", arguments, deeper, prefix)
        else:
            if self.devices != CPU_ONLY:
                source += f"{deeper}if {operand}.{self.devices}:\n"
                source += self._lookup("_accelerator", arguments, deeper + " " * 4, prefix)
            source += f"{deeper}if {operand}.is_cpu:\n"
            source += self._lookup("_host", arguments, deeper + " " * 4, prefix)
        return source + f"{indent}return {prefix}_miss({arguments})\n"

    def _lookup(self, root: str, arguments: str, indent: str, prefix: str) -> str:
        source = "".join(f"{indent}{line}\n" for line in self._reads)
        if self._shortened(root):
            if not self._values:
                return source + self._branches(f"{root}0", "", arguments, indent, prefix)
            for known in range(_KNOWN):
                name = f"{root}{known}"
                same = " and ".join(f"_value{i} is {prefix}{name}_is{i}" for i in range(len(self._values)))
                source += f"{indent}if {same}:\n{self._branches(name, '', arguments, indent + ' ' * 4, prefix)}"
        node = f"{prefix}{root}"
        if root == "_any":
            node += f".get({self.operator.device}, {prefix}_default0)"
        return source + f"{indent}return {self._nested(node, 0, prefix)}({arguments})\n"

    def _branches(self, name: str, bits: str, arguments: str, indent: str, prefix: str) -> str:
        """What follows equal values: the conditions, then the call."""
        level = self._first_truth + len(bits)
        if len(bits) == min(len(self._truths), _BRANCHED):
            return f"{indent}return {self._nested(f'{prefix}{name}_to{bits}', level, prefix)}({arguments})\n"
        holds = self._branches(name, f"{bits}1", arguments, indent + " " * 4, prefix)
        fails = self._branches(name, f"{bits}0", arguments, indent, prefix)
        return f"{indent}if {self._steps[level].expression}:\n{holds}{fails}"

    def _nested(self, node: str, level: int, prefix: str) -> str:
        for number, step in enumerate(self._steps[level:], level + 1):
            node = step.lookup(node, f"{prefix}_default{number}")
        return node
