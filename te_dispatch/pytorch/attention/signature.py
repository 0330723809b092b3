# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The input signatures of `DotProductAttention`: of query, key and value, and no other tensors."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.core import scopes
from te_dispatch.ops.checks.guards import PLAIN, guard_for
from te_dispatch.pytorch.attention.inputs import shared_packing
from te_dispatch.pytorch.capture.signatures import SignatureCache, capturable, reason_of_miss, unwatched
from te_dispatch.pytorch.capture.statistics import STATISTICS

if TYPE_CHECKING:
    from te_dispatch.pytorch.attention.function import AttentionCall

#: Query, key, value, all three packed, key and value packed; None for what was not given.
Given = tuple[torch.Tensor | None, ...]


class AttentionSignature:
    """Of the calls of one module that need no further checks.

    Attributes:
        arguments: what it was called with beside tensors. given: which operands there are. guard: of their metadata.
        packing: that of three operands given apart, which their metadata do not tell.
        scope: the bindings. deterministic: PyTorch's flag, which no attribute or argument tells.
        grad: whether gradients were recorded. trains: whether any were wanted.
        call: what such a call came to. captured: the same with the program, None until it was captured.
        replays: whether it may be captured.
    """

    __slots__ = (
        "arguments", "given", "guard", "packing", "deterministic", "scope", "grad", "trains", "call", "captured",
        "replays",
    )  # fmt: skip

    def __init__(self, operands: Given, arguments: Any, call: AttentionCall) -> None:
        options = call.options
        present = [x for x in operands if x is not None]
        self.arguments = arguments
        self.given = tuple([x is not None for x in operands])
        self.guard = guard_for(present, [True] * len(present))
        self.packing = options.packing if options.joined == 0 else None
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.scope = scopes.capture()
        self.grad = torch.is_grad_enabled()
        self.call = call
        self.captured: AttentionCall | None = None
        self.trains = self.grad and any(x.requires_grad for x in present)
        # Dropout draws a random state for every call; a learnable offset is a parameter that an operand list lacks.
        self.replays = not (options.dropout_p or options.with_max_logit or options.softmax_type == "learnable")

    def made(self) -> AttentionCall:
        """The call to run: the captured one; else the plain one, which is captured now if possible."""
        if not unwatched():
            STATISTICS.misses[reason_of_miss()] += 1
        elif not self.replays:
            STATISTICS.misses["options of attention"] += 1
        elif self.captured is None:
            STATISTICS.misses["new signature"] += 1
            return self.capturing()
        else:
            if self.captured.program is not None:
                STATISTICS.hits += 1
            return self.captured
        return self.call

    def capturing(self) -> AttentionCall:
        """The call, to be captured if this one can be."""
        if not self.replays or not capturable():
            return self.call
        call: AttentionCall = copy.copy(self.call)
        call.capture = self._keep
        return call

    def _keep(self, found: AttentionCall) -> None:
        self.captured = found


class AttentionSignatures(SignatureCache):
    """The signatures of one module."""

    __slots__ = ()

    def find(self, operands: Given, arguments: Any) -> AttentionSignature | None:
        """That of a call with these operands, None where there was no such call."""
        present = [x for x in operands if x is not None]
        entries = self.by_shape.get(present[0].shape) if present and present[0].__class__ in PLAIN else None
        if entries is None:
            return None
        given = tuple([x is not None for x in operands])
        scope, grad = scopes.capture(), torch.is_grad_enabled()
        deterministic = torch.are_deterministic_algorithms_enabled()
        for index, found in enumerate(entries):
            if (
                found.scope is scope
                and found.grad is grad
                and found.deterministic is deterministic
                and found.given == given
                and found.arguments == arguments
                and found.guard(*present)
                and (len(present) < 3 or shared_packing(*present) == found.packing)
            ):
                if index or entries is not self.recent:
                    self.use(present[0].shape, index)
                return found  # type: ignore[no-any-return]
        return None

    def made(self, operands: Given, arguments: Any, call: AttentionCall) -> AttentionCall:
        """The call to run for a new signature, which is added where its guard can identify later calls."""
        STATISTICS.misses[reason_of_miss()] += 1
        if any(x is not None and x.__class__ not in PLAIN for x in operands) or not self.admits():
            return call
        try:
            hash(arguments)
        except TypeError:  # a window as a list, say, which may change
            return call
        signature = AttentionSignature(operands, arguments, call)
        self.add(next(x for x in operands if x is not None).shape, signature)
        return signature.capturing()
