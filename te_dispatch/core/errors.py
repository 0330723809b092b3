# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Errors of the runtime. All derive from `DispatchError`, so that a caller can tell them from a kernel's own."""

from __future__ import annotations


class DispatchError(Exception):
    """Base of every error the runtime itself raises."""


class Declined(DispatchError):
    """Raised by an implementation, before anything is written, to pass this call on to the next candidate.

    The message says why in one phrase. Only this exception falls back; anything else reaches the caller.
    """


class NoImplementation(DispatchError):
    """Nothing is left that serves a call. The message is the decision's whole table."""


class PolicyError(DispatchError):
    """A policy that cannot be used. The message starts with ``file:line:column`` where there is one."""


class BindError(DispatchError):
    """An implementation that could not be imported or whose signature does not fit."""


class PlanError(DispatchError):
    """A lock file that does not fit this machine; the message is the difference."""


class ShadowMismatch(DispatchError):
    """A sampled call differs from what another backend makes of it, under a policy with ``on_mismatch: raise``.

    Attributes:
        operator, implementation, other: names: what was called, on what, and the backend that it differs from.
        finding: what differs, in words.
        file: where the call's inputs are, for ``te-dispatch conformance --replay``; None where none was written.
    """

    def __init__(
        self, message: str, operator: str, implementation: str, other: str, finding: str, file: str | None
    ) -> None:
        super().__init__(message)
        self.operator = operator
        self.implementation = implementation
        self.other = other
        self.finding = finding
        self.file = file


class CaptureError(DispatchError):
    """A call during CUDA graph capture that would have to resolve, allocate outside the pool or synchronize."""
