# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is expected of a case: another backend's results, by default the reference's float64 ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.conformance import transfer
from te_dispatch.conformance.case import Case
from te_dispatch.conformance.forwards import NotClaimed, complete
from te_dispatch.conformance.maker import REFERENCE
from te_dispatch.conformance.outputs import named_results
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject, subjects
from te_dispatch.core.manager import OpManager
from te_dispatch.core.operator import OPERATORS


class OracleError(Exception):
    """The oracle has no answer: nothing of its backend serves the call. An error of the set-up, not of the subject."""


class Oracle:
    """Runs a backend's implementations on the host (or where that backend runs) and keeps the last cases' results.

    Args:
        manager: whose registry it is in.
        backend: ``reference``, or another to compare with.
        device: where that backend runs.
    """

    #: Results of so many cases are kept: the implementations of one operator come one after the other.
    KEPT = 256

    def __init__(self, manager: OpManager, backend: str = REFERENCE, device: str = "cpu") -> None:
        self.manager = manager
        self.backend = backend
        self.device = torch.device(device)
        self._results: dict[str, dict[str, torch.Tensor]] = {}

    def results(self, space: Space, case: Case, make: Callable[[], Arguments]) -> dict[str, torch.Tensor]:
        """Expected results by path, on the host.

        Raises:
            OracleError: the backend does not serve the call.
        """
        found = self._results.get(case.id)
        if found is None:
            while len(self._results) >= self.KEPT:
                self._results.pop(next(iter(self._results)))
            found = self._results[case.id] = self._run(space, case, make())
        return found

    def _run(self, space: Space, case: Case, arguments: Arguments) -> dict[str, torch.Tensor]:
        operator = OPERATORS[space.operator]
        given: Any = transfer.widened(arguments) if space.widen else transfer.moved(arguments, "cpu")
        if space.oracle is not None:
            result = space.oracle(given, case.values)
        else:
            given = transfer.moved(given, self.device)
            result, given = self.call(space, given)
        named = named_results(operator, result, given)
        return {path: tensor.detach().cpu().clone() for path, tensor in named.items()}

    def call(self, space: Space, arguments: Arguments) -> tuple[Any, Arguments]:
        """The result of the backend's first implementation that serves the call, and the arguments it had."""
        reasons = []
        for subject in self.subjects(space.operator):
            try:
                given = complete(subject, space, arguments) if space.forward else arguments
            except NotClaimed as error:
                reasons.append(f"{subject.id}: {error}")
                continue
            claim = subject.claim(given)
            if claim.refusal is None:
                return subject.call(given), given
            reasons.append(f"{subject.id}: {claim.refusal}")
        why = "; ".join(reasons) or f"{self.backend} does not implement it"
        raise OracleError(f"nothing to compare {space.operator} with: {why}")

    def subjects(self, operator: str) -> list[Subject]:
        return subjects(self.manager, OPERATORS[operator], self.device, self.backend)
