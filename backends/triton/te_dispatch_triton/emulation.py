# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The chips that this backend emulates: AMD's, by executing their machine code on the CPU (docs/rocm.md)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from te_dispatch.core.emulation import Emulation, EmulatorMissing
from te_dispatch.core.facts import UNKNOWN
from te_dispatch_triton import probe

_INSTALL = 'in a checkout of te_dispatch: pip install -e "tools/gfx_emulator[isa]"'
_UNPROVEN = (
    "speed, and anything else of timing",
    "the memory model: memory instructions are complete when they were executed",
    "idle cycles that instructions need between them",
    "results that AMD's manuals leave open",
    "ROCm: its driver, and Triton's launcher for it",
)


def missing() -> str | None:
    """Why nothing can be emulated here, None if it can."""
    reason = probe.missing_triton()
    if reason is not None:
        return reason
    if probe.interpreting():
        return f"{probe.INTERPRET} is set, so that Triton compiles nothing: unset it"
    if not probe.compiles_for("amd"):
        return "the installed Triton has no compiler for AMD's chips"
    if importlib.util.find_spec("gfx_emulator") is None:
        return f"gfx_emulator, which executes AMD's machine code, is not installed; {_INSTALL}"
    if importlib.util.find_spec("tinygrad") is None:
        return (
            "tinygrad, whose tables decode AMD's machine code for gfx_emulator, is not installed; it needs Python "
            f"3.11; {_INSTALL}"
        )
    return None


@contextmanager
def emulator(arch: str) -> Iterator[Emulation]:
    """CPU tensors are on an emulated chip: host code chooses for it, its kernels are compiled for it and executed.

    Raises:
        EmulatorMissing: something is not installed; says what to do.
    """
    reason = missing()
    if reason is not None:
        raise EmulatorMissing(reason)
    from te_dispatch_triton.crosscompile.emulated import emulated

    facts = {"triton.ready": True, "version.triton": probe.triton_version() or UNKNOWN}
    with emulated(arch):
        yield Emulation(f"gfx_emulator {importlib.metadata.version('gfx-emulator')}", facts, _UNPROVEN)
