# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Certifying a backend against the reference.

    from te_dispatch.conformance import certify

    report = certify("acme", op="gemm", level="full")
    report.ok, report.counts
    for outcome in report.failures():
        print(outcome.unit, outcome.message)

| module | what it holds |
|---|---|
| `case`, `space`, `families/` | what can be called: cases, the spaces they come from, one module per operator family |
| `maker`, `inputs`, `covering` | the arguments of a case: data, kinds of values, pairwise coverage |
| `subject`, `oracle`, `trial` | an implementation, what is expected, and one run of the one against the other |
| `forwards` | the forward that a backward goes with |
| `rules`, `bounds`, `decoding` | how results are judged, and where the limits come from |
| `checks/`, `memory` | what is checked of a call: numbers, memory, bits, streams, threads, graphs |
| `settings`, `planning`, `execute`, `running`, `certification` | from what was asked to outcomes |
| `emulated` | devices that a backend emulates on the host |
| `isolation`, `serving` | worker processes: the side that starts them, and what they run |
| `expectations`, `journal`, `outcome`, `report/` | skips and known failures, resuming, results and their pages |

Start with `trial`. May import: torch, `te_dispatch.core`, `te_dispatch.ops`, `te_dispatch.numerics` and
`te_dispatch.torch_private`; pytest in the modules that are pytest's. Never a backend: those are found by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_dispatch.conformance.case import Case, Unit
    from te_dispatch.conformance.certification import certify
    from te_dispatch.conformance.outcome import Outcome
    from te_dispatch.conformance.report.record import Report
    from te_dispatch.conformance.settings import Settings, UsageError

__all__ = ["Case", "Outcome", "Report", "Settings", "Unit", "UsageError", "certify"]

_HOME = {
    "Case": "case",
    "Unit": "case",
    "certify": "certification",
    "Outcome": "outcome",
    "Report": "report.record",
    "Settings": "settings",
    "UsageError": "settings",
}


def __getattr__(name: str) -> Any:
    # PyTorch loads with the first use, not with the package: pytest imports this to find the plugin.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
