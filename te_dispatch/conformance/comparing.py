# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Shadow mode's part of the kit: one call of a running job, judged like a case (`te_dispatch.core.shadow`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from te_dispatch.conformance.case import Case
from te_dispatch.conformance.maker import REFERENCE
from te_dispatch.conformance.oracle import Oracle, OracleError
from te_dispatch.conformance.outputs import differing_form
from te_dispatch.conformance.recording import RECORDED, Recording, copied, versions
from te_dispatch.conformance.rules import Finding
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject, subject
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core import codegen
from te_dispatch.core.manager import OpManager
from te_dispatch.core.operator import Operator
from te_dispatch.core.shadow import NotComparable
from te_dispatch.ops import alloc


class RecordedTrial(Trial):
    """A trial on a call that was made, of the implementation that made it or of another.

    A backward that reads what only its own forward saved has that among its arguments; another implementation, and the
    oracle, get what their own forward saves.
    """

    def __init__(self, subject: Subject, recording: Recording, oracle: Oracle, space: Space, case: Case) -> None:
        super().__init__(subject, case, oracle, space)
        self._own = recording.implementation == subject.id

    def with_forward(self, arguments: Arguments) -> Arguments:
        return arguments if self._own else super().with_forward(arguments)


def trial_of(subject: Subject, case: Case, oracle: Oracle) -> RecordedTrial:
    """The trial of a subject on a recorded case.

    Raises:
        UsageError: the file cannot be used.
    """
    recording = Recording.of_case(case)
    return RecordedTrial(subject, recording, oracle, recording.space(), case)


class Comparison:
    """One call, copied before it is made and judged afterwards.

    Args:
        manager: whose registry holds both backends.
        operator, candidate: what is called on what.
        against: the backend that is taken to be right.
        args: of the call, by position.

    Raises:
        NotComparable: there is nothing that such a call can be judged by.
    """

    def __init__(
        self, manager: OpManager, operator: Operator, candidate: str, against: str, args: tuple[Any, ...]
    ) -> None:
        if alloc.replaced():
            # The other backend would be given memory that is meant for this call's results.
            raise NotComparable("made while a compiled graph runs")
        self._manager = manager
        device = codegen.reader(operator, manager.namespace, operator.device, "device")(*args)
        self._subject = subject(manager, operator, device, candidate)
        arguments = dict(zip(operator.signature.parameters, args))
        with aside(device):
            self.recording = Recording(operator.name, operator.version, candidate, against, arguments, device.type)
            self._space = self.recording.space()  # before anything is copied: it may refuse
            self.recording.arguments = copied(arguments)

    def finding(self, result: Any, args: tuple[Any, ...]) -> str | None:
        """What is wrong with the call's result in words, None if nothing is.

        Raises:
            NotComparable: the other backend does not serve the call.
        """
        arguments = dict(zip(self._subject.operator.signature.parameters, args))
        where = "cpu" if self.recording.against == REFERENCE else str(self._subject.device)
        with aside(self._subject.device):
            oracle = Oracle(self._manager, self.recording.against, where)
            case = Case(self.recording.operator, RECORDED, ())
            trial = RecordedTrial(self._subject, self.recording, oracle, self._space, case)
            difference = differing_form(result, self._shape(arguments))
            if difference is not None:
                return f"not what the shape function says: {difference}"
            try:
                trial.judge(result, arguments)
            except OracleError as error:
                raise NotComparable(str(error)) from error
            except Failure as failure:
                return _brief(failure)
        return None

    def _shape(self, arguments: Arguments) -> Any:
        """The form that the result must have: an implementation may say it itself (scales in a layout of its own)."""
        operator = self._subject.operator
        own = self._manager.functions.declared(self._subject.id, "output_shape")
        return (own or operator.shape)(**arguments)

    def save(self, path: str, finding: str, policy: str) -> None:
        """Write the call to a file that can be replayed."""
        backends = self._manager.snapshot.backends
        used = [backends[name] for name in (self._subject.id.partition(".")[0], self.recording.against)]
        self.recording.finding, self.recording.policy = finding, policy
        self.recording.versions = versions({one.distribution: one.version for one in used})
        with aside(self._subject.device):
            self.recording.save(path)


def _brief(failure: Failure) -> str:
    wrong: list[Finding] = [finding for finding in failure.findings if not finding.passed]
    return "; ".join(finding.message for finding in wrong) or str(failure)


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """A block that is not changed by what the job has set: no autocast, no inference mode, and new tensors are on the
    host unless told otherwise. Generators need no care: no kernel reads one (`rng_state` is an argument), nor do the
    kit's rules; and to save and restore them would undo what other threads draw meanwhile."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())  # some bounds differentiate; copies require no gradient
        for kind in dict.fromkeys(("cpu", device.type)):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.device("cpu"))
        yield
