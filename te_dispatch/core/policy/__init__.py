# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Policies: what they are (`model`), how one is read from YAML, and what it says of one call.

| module | what it does |
|---|---|
| `model` | policies as data, and how layers merge; all of it is exported here |
| `view` | what a policy says of the candidates for one call |
| `file` | reading a policy file and what it includes, through the five below |
| `parse` | YAML text to plain data that knows its lines and columns |
| `schema` | the keys and their types; the JSON Schema |
| `known` | the words of this machine, and the nearest one to a mistake |
| `when` | the conditions of a rule |
| `check` | contradictions inside one layer |

Start with `model`, which alone loads with the package. May import what `te_dispatch.core` may. `file`, `parse` and
`schema` need PyYAML and msgspec: import those inside the function that reads a file, so that a process that reads none
pays for neither.
"""

from te_dispatch.core.policy.model import (
    BUILT_IN,
    COMPOSITE,
    NATIVE,
    TRAIT_PREFIX,
    Numerics,
    Origin,
    Policy,
    Rule,
    Selector,
    Shadow,
    merge,
)

__all__ = [
    "BUILT_IN",
    "COMPOSITE",
    "NATIVE",
    "TRAIT_PREFIX",
    "Numerics",
    "Origin",
    "Policy",
    "Rule",
    "Selector",
    "Shadow",
    "merge",
]
