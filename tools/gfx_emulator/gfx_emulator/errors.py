# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What execution can end with. Every error names the kernel and, where there is one, the instruction."""

from __future__ import annotations


class EmulatorError(Exception):
    """Base of the errors raised here."""


class CodeObjectError(EmulatorError):
    """A file is no code object that can be executed, or asks for what is not emulated."""


class NotImplementedInstruction(EmulatorError):
    """An instruction, or a form of it, has no implementation. The message holds its name."""


class AccessError(EmulatorError):
    """A load, store or atomic touched bytes outside what was registered: names instruction, lane and address."""


class RaceError(EmulatorError):
    """Two waves of a workgroup accessed the same bytes of LDS, one of them writing, without a barrier between."""


class HangError(EmulatorError):
    """Waves wait at a barrier that cannot be reached, or the limit of instructions was exceeded."""
