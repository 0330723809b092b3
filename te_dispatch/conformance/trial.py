# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""One implementation on one case: fresh arguments, the call, what the oracle expects, and the judgement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.conformance import transfer
from te_dispatch.conformance.case import Case
from te_dispatch.conformance.forwards import NotClaimed, complete
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.memory import same_bits
from te_dispatch.conformance.oracle import Oracle
from te_dispatch.conformance.outputs import ARGUMENT, differing_form, named_results, shared_memory, wrong_label
from te_dispatch.conformance.rules import Finding, Rule, judge
from te_dispatch.conformance.space import Arguments, Judged, Space, Values, find
from te_dispatch.conformance.subject import Claim, Subject
from te_dispatch.conformance.world import World

#: Of an argument that another call's arguments do not have.
_ABSENT = object()


class Failure(AssertionError):
    """A check failed: the message says in words what is wrong.

    Attributes:
        findings: what was judged, where the failure is one of numbers.
    """

    def __init__(self, message: str, findings: list[Finding] | None = None) -> None:
        super().__init__(message)
        self.findings = findings or []


class KitError(Exception):
    """A rule or a judgement broke: a mistake of the kit's, not of the subject's. Never a pass."""


class Trial:
    """What a check works with.

    Attributes:
        subject, space, case: what is tested on what.
        oracle: whose results are expected.
        findings: of all judgements so far, for the report.
        notes: what a check wants reported although it passed.
    """

    def __init__(self, subject: Subject, case: Case, oracle: Oracle, space: Space | None = None) -> None:
        self.subject = subject
        self.case = case
        self.oracle = oracle
        self.space = space or find(case.operator, case.space)
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    @property
    def device(self) -> torch.device:
        return self.subject.device

    def arguments(self) -> Arguments:
        """Fresh arguments on the host; the same bytes every time."""
        return self.space.make(self.case.values, Maker(self.case, self.subject.manager))

    def on_device(self, arguments: Mapping[str, Any] | None = None) -> Arguments:
        """A copy on the subject's device, with what its forward saves where it is a backward.

        Raises:
            NotClaimed: no forward that this backward goes with serves the call.
        """
        there: Arguments = transfer.moved(self.arguments() if arguments is None else arguments, self.device)
        return self.with_forward(there)

    def with_forward(self, arguments: Arguments) -> Arguments:
        """Fill in the results of this backward's own forward, where the space says how to call it."""
        if self.space.forward is None:
            return arguments
        return complete(self.subject, self.space, arguments)

    def claim(self, arguments: Mapping[str, Any]) -> Claim:
        """Whether dispatch would let the subject serve these arguments.

        Raises:
            NotClaimed: it would not.
        """
        claim = self.subject.claim(arguments)
        if claim.refusal is not None:
            raise NotClaimed(claim.refusal)
        return claim

    def with_seed(self, seed: int) -> Trial:
        """The same of the same case with other data."""
        return Trial(self.subject, dataclasses.replace(self.case, seed=seed), self.oracle, self.space)

    def with_values(self, how: str, change: Callable[[Arguments], Arguments]) -> Trial:
        """The same case with operands that hold other values. What it finds is reported with what this trial finds.

        Args:
            how: part of the new case's id; equal words mean equal changes.
            change: the new arguments, on the host, of the case's own.
        """

        def make(values: Values, maker: Maker) -> Arguments:
            return change(self.space.make(values, maker))

        return self._made_by(make, self.case.axes, how)

    def with_axes(self, values: Values) -> Trial:
        """The case with other values of some axes, but with the data of this one as far as these are of the same form.
        What it finds is reported with what this trial finds."""
        seed = self.case.random_seed

        def make(values: Values, maker: Maker) -> Arguments:
            return self.space.make(values, Maker(maker.case, maker.manager, seed))

        return self._made_by(make, tuple(values.items()), f"data_{seed}")

    def _made_by(
        self, make: Callable[[Values, Maker], Arguments], axes: tuple[tuple[str, str], ...], how: str
    ) -> Trial:
        """A case whose arguments another function makes; its id says so. Findings and notes are shared."""
        case = dataclasses.replace(self.case, axes=(*axes, ("memory", how)))
        other = Trial(self.subject, case, self.oracle, dataclasses.replace(self.space, make=make))
        other.findings, other.notes = self.findings, self.notes
        return other

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Run the subject, and see that it leaves global state, and what the arguments are made of, as it found them.

        Raises:
            Failure: it does not, whether it returned or raised.
        """
        # What an import changes is not the call's.
        self.subject.manager.functions.bound(self.subject.operator, self.subject.id)
        world, before = World(self.device), dict(transfer.described(arguments))
        try:
            return self.subject.call(arguments)
        finally:
            changed = world.changes()
            if changed:
                raise Failure(f"a call changed global state and left it so: {'; '.join(changed)}")
            after = dict(transfer.described(arguments))
            for path in {**before, **after}:  # in the arguments' order
                old, new = before.get(path, _ABSENT), after.get(path, _ABSENT)
                if old == new:
                    continue
                if path.startswith(transfer.ATTACHED):
                    raise Failure(f"{path} is {new} after the call, was {old}")
                if isinstance(old, tuple) and isinstance(new, tuple) and old[:-1] == new[:-1]:
                    now = "requires" if new[-1] else "does not require"
                    raise Failure(f"{path} {now} a gradient after the call: operators are below autograd")
                raise Failure(
                    f"{path} is another list, tensor or number than the caller gave, who sees nothing of what is "
                    "written there"
                )

    def results(self, result: Any, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What a call made and wrote, by path, on the device."""
        return named_results(self.subject.operator, result, arguments)

    def made(self, result: Any, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What a call returned, by path: `results` without the arguments that it wrote."""
        return {path: x for path, x in self.results(result, arguments).items() if not path.startswith(ARGUMENT)}

    def expected(self) -> dict[str, torch.Tensor]:
        """The oracle's results by path, on the host. Computed once per case, whichever implementation asks."""
        return self.oracle.results(self.space, self.case, self.arguments)

    def expected_form(self, arguments: Mapping[str, Any]) -> Any:
        """What the operator's shape function says of a call."""
        operator = self.subject.operator
        return operator.shape(**dict(zip(operator.signature.parameters, self.subject.positional(arguments))))

    def require_form(self, result: Any, arguments: Mapping[str, Any], expected: Any) -> None:
        """See that a result is what `expected_form` says, labels included, and memory of its own.

        Raises:
            Failure: it is not.
        """
        difference = differing_form(result, expected)
        if difference is not None:
            raise Failure(f"not what the shape function says: {difference}")
        mislabelled = wrong_label(result, self.subject)
        if mislabelled is not None:
            raise Failure(mislabelled)
        shared = shared_memory(self.made(result, arguments), arguments, expected)
        if shared is not None:
            raise Failure(shared)

    def judge(
        self,
        result: Any,
        arguments: Mapping[str, Any],
        read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> list[Finding]:
        """Compare a call's results with the oracle's, and keep the findings.

        Args:
            read: (result, what is expected) -> what is judged in place of the result, where a check leaves some of it
                open.

        Raises:
            Failure: a result is missing, or not as it must be.
            KitError: the kit cannot tell.
        """
        self.require_form(result, arguments, self.expected_form(arguments))
        actual = {path: tensor.detach().cpu() for path, tensor in self.results(result, arguments).items()}
        expected = self.expected()
        if actual.keys() != expected.keys():
            raise Failure(self._other_results(actual, expected))
        if read is not None:
            actual = {path: read(tensor, expected[path]) for path, tensor in actual.items()}
        judged = Judged(self.case.values, self.arguments(), expected, actual, self.subject.traits, self.subject.claims)
        try:
            rules = self.space.rules(judged)
        except Exception as error:
            raise KitError(f"the rules of space {self.space.id}: {type(error).__name__}: {error}") from error
        return self.compare(actual, expected, rules)

    def _other_results(self, actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str:
        """What is wrong with a call whose results are not those that are expected, in words."""
        missing, more = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
        if not missing and more == [f"{ARGUMENT}out"]:
            # An `out` that is returned is among the results under the result's own name.
            before = dict(transfer.tensors(self.arguments())).get("out")
            written = before is None or not same_bits(before.cpu(), actual[more[0]])
            if written:
                return "out was given and written, but another tensor was returned"
            return "out was given, and was neither written nor returned"
        return f"other results than expected: missing {missing or 'none'}, not expected {more or 'none'}"

    def compare(
        self, actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], rules: Mapping[str, Rule]
    ) -> list[Finding]:
        """Judge results by their rules, and keep the findings.

        Raises:
            Failure: a result is not as it must be.
            KitError: there is no rule for a result, or one cannot be applied.
        """
        unruled = sorted(actual.keys() - rules.keys())
        if unruled:
            raise KitError(f"space {self.space.id} has no rule for {unruled}")
        try:
            found = [judge(path, rules[path], actual[path], expected[path]) for path in actual]
        except Exception as error:
            raise KitError(f"judging a result of space {self.space.id}: {type(error).__name__}: {error}") from error
        self.findings += found
        wrong = [finding.message for finding in found if not finding.passed]
        if wrong:
            raise Failure("; ".join(wrong), found)
        return found
