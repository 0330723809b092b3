# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What kinds of arguments an operator takes, for host code that tells its calls apart by them.

A backend that keeps something for each kind of call needs a key: everything of the arguments that its function may
read. `parameters` says for each what it may be, so that no list of an operator's arguments stands in the backend.
"""

from __future__ import annotations

from collections.abc import Mapping

import te_dispatch.ops.declared  # noqa: F401  # the operators
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.parameters import (
    DTYPE,
    FLAG,
    INTEGER,
    INTEGERS,
    NUMBER,
    NUMBERS,
    OPERAND,
    QUANTIZER,
    RECORD,
    SAVED,
    STRING,
    TENSOR,
    Member,
    Parameter,
)

__all__ = [
    "DTYPE", "FLAG", "INTEGER", "INTEGERS", "NUMBER", "NUMBERS", "OPERAND", "QUANTIZER", "RECORD", "SAVED", "STRING",
    "TENSOR", "Member", "Parameter", "parameters",
]  # fmt: skip


def parameters(operator: str) -> Mapping[str, Parameter]:
    """The parameters of an operator by name, in the order of its signature.

    Raises:
        KeyError: there is no such operator.
    """
    return OPERATORS[operator].parameters
