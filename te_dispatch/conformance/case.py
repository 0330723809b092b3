# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is certified, by name: a case is one call of an operator, a unit is one check of one implementation on a case.

Ids are text that a person can read and the command line can read back: from an id alone the same bytes are made
again, on any machine.

    gemm.plain[layout=NT,dtype=bf16,shape=127x128x64,values=normal]
    torch.matmul/values/gemm.plain[layout=NT,dtype=bf16,shape=127x128x64,values=normal]#7
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

_CASE = re.compile(r"(?P<operator>\w+)\.(?P<space>\w+)\[(?P<axes>[^\]]*)\](?:#(?P<seed>\d+))?")


@dataclass(frozen=True)
class Case:
    """One call: the operator, the space it comes from, a value for every axis, and a seed.

    Attributes:
        operator: e.g. ``gemm``.
        space: the `Space` of that operator, e.g. ``plain``.
        axes: (axis, value) in the space's order.
        seed: of the data; shown only where it is not 0.
    """

    operator: str
    space: str
    axes: tuple[tuple[str, str], ...]
    seed: int = 0

    @property
    def id(self) -> str:
        axes = ",".join(f"{name}={value}" for name, value in self.axes)
        return f"{self.operator}.{self.space}[{axes}]" + (f"#{self.seed}" if self.seed else "")

    @property
    def values(self) -> dict[str, str]:
        """Axis -> value."""
        return dict(self.axes)

    @property
    def random_seed(self) -> int:
        """Of the generator: a checksum of the id, so that each case has data of its own."""
        return zlib.crc32(self.id.encode())

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read an id.

        Raises:
            ValueError: the text is no case id; says what one looks like.
        """
        found = _CASE.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"case: got {text!r}, expected operator.space[axis=value,...], optionally with #seed")
        axes = []
        for part in filter(None, found["axes"].split(",")):
            name, equals, value = part.partition("=")
            if not equals:
                raise ValueError(f"case: got {part!r} in {text!r}, expected axis=value")
            axes.append((name, value))
        return cls(found["operator"], found["space"], tuple(axes), int(found["seed"] or 0))

    @classmethod
    def of(cls, operator: str, space: str, values: Mapping[str, str], seed: int = 0) -> Case:
        return cls(operator, space, tuple(values.items()), seed)


@dataclass(frozen=True)
class Unit:
    """One thing that passes or fails: an implementation, a check, and the case it is made on.

    Attributes:
        implementation: e.g. ``torch.matmul``.
        check: ``values`` (the numbers, and memory) or one of the behaviours in `te_dispatch.conformance.checks`.
    """

    implementation: str
    check: str
    case: Case

    @property
    def id(self) -> str:
        return f"{self.implementation}/{self.check}/{self.case.id}"

    @property
    def backend(self) -> str:
        return self.implementation.partition(".")[0]

    @classmethod
    def parse(cls, text: str) -> Unit:
        """Read an id.

        Raises:
            ValueError: the text is no unit id.
        """
        parts = text.strip().split("/", 2)
        if len(parts) != 3:
            raise ValueError(f"unit: got {text!r}, expected implementation/check/operator.space[axis=value,...]")
        return cls(parts[0], parts[1], Case.parse(parts[2]))
