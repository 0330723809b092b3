# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the runtime knows of operands that are not tensors: quantized records and quantizers.

The runtime compares facts, and does not interpret what the facts are about. The room that declares operators describes
their operands here, once and before it declares the first one. `te_dispatch.ops.operands` does so for this project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Whether a value is an argument of some kind.
Test = Callable[[Any], bool]


class _NoRecord:
    """The class of records before one is described: nothing is an instance of it."""


def _no_rows(value: Any) -> int:
    raise TypeError("operands are not described; import te_dispatch.ops")


@dataclass
class Operands:
    """A description of operands. Read its attributes when they are needed: a copy may be older than the description.

    Attributes:
        record: the class of quantized tensors, which have ``encoding`` and ``scaling`` where a tensor has a dtype.
        records: `record`, and the class that shape functions return in its place. An operand is a record if its class
            is one of these, subclasses excluded: generated code looks the class up in a set.
        row_count: a matrix whose leading dimensions flatten, a tensor or a record -> its number of rows.
        scalings: the values of a record's ``scaling``.
        quantizers: the values of a quantizer's ``kind``.
        arguments: kind of argument (`te_dispatch.core.parameters`) -> what it is in words, and the test of a value. For
            kinds that `te_dispatch.core.arguments` cannot test itself.
    """

    record: type = _NoRecord
    records: frozenset[type] = frozenset()
    row_count: Callable[[Any], int] = _no_rows
    scalings: tuple[str, ...] = ()
    quantizers: tuple[str, ...] = ()
    arguments: Mapping[str, tuple[str, Test]] = field(default_factory=dict)

    def describe(
        self,
        *,
        record: type,
        imitated_record: type,
        row_count: Callable[[Any], int],
        scalings: tuple[str, ...],
        quantizers: tuple[str, ...],
        arguments: Mapping[str, tuple[str, Test]],
    ) -> None:
        """Set all of it; see the attributes.

        Args:
            imitated_record: the class of records that shape functions return.
        """
        self.record = record
        self.records = frozenset((record, imitated_record))
        self.row_count = row_count
        self.scalings = scalings
        self.quantizers = quantizers
        self.arguments = dict(arguments)

    def names(self) -> dict[str, Any]:
        """The names that expressions of facts, and the lookups generated from them, may use."""
        return {"_RECORDS": self.records, "_rows": self.row_count, "_Record": self.record}


#: The description of this process's operands.
OPERANDS = Operands()
