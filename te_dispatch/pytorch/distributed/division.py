# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""How ranks divide a module's weights, as its autograd Function is told."""

from __future__ import annotations

from typing import Any, NamedTuple


class Division(NamedTuple):
    """How the ranks of a group divide the weights of a module.

    Attributes:
        group: the process group, of several ranks.
        column: whether the first product's weight is divided by outputs. row: the last one's by inputs.
        sequence: whether the ranks divide the tokens outside of the module.
    """

    group: Any
    column: bool
    row: bool
    sequence: bool
