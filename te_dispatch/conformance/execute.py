# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Running one unit, in this process: whatever happens becomes an `Outcome`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from dataclasses import dataclass, field

import torch

from te_dispatch.conformance import checks
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.comparing import trial_of
from te_dispatch.conformance.forwards import NotClaimed
from te_dispatch.conformance.oracle import Oracle, OracleError
from te_dispatch.conformance.outcome import DECLINED, REFUSED, Outcome, bounded
from te_dispatch.conformance.recording import RECORDED
from te_dispatch.conformance.subject import Calls, Subject, subject
from te_dispatch.conformance.trial import Failure, KitError, Trial
from te_dispatch.conformance.world import World
from te_dispatch.core.errors import BindError, Declined
from te_dispatch.core.manager import OpManager
from te_dispatch.core.operator import OPERATORS

#: Frames of a traceback that a failed unit shows, and characters of the error's own text before them: of its beginning,
#: and of its end, where compilers say what is wrong.
_FRAMES, _BEGINNING, _END = 3, 200, 300


@dataclass
class Bench:
    """Where units run: a registry, a device, an oracle.

    Attributes:
        manager: whose registry the subjects are in.
        device: of the subjects.
        oracle: what is expected.
    """

    manager: OpManager
    device: torch.device
    oracle: Oracle
    _subjects: dict[str, Subject] = field(default_factory=dict)

    def usable(self) -> bool:
        """Whether the device still works in this process: a fault of a kernel's loses it for good."""
        if self.device.type == "cpu":
            return True
        try:
            torch.zeros(1, device=self.device).add_(1).item()
        except RuntimeError:
            return False
        return True

    def subject(self, unit: Unit) -> Subject:
        """The implementation that a unit is about.

        Raises:
            ValueError: it is not installed.
        """
        key = f"{unit.case.operator}/{unit.implementation}"
        if key not in self._subjects:
            operator = OPERATORS.get(unit.case.operator)
            if operator is None:
                raise ValueError(f"operator: {unit.case.operator!r} is none of {', '.join(OPERATORS)}")
            self._subjects[key] = subject(self.manager, operator, self.device, unit.implementation)
        return self._subjects[key]


#: What to do in place of raising NotImplementedError, which reaches the caller.
_DECLINE = (
    "what an implementation does not serve it leaves to other backends, by its requirements or by raising "
    "te_dispatch.core.errors.Declined"
)


def run_unit(unit: Unit, bench: Bench) -> Outcome:
    """Run one unit. Only a mistake in the kit or in the id raises; all that the subject does is an outcome.

    Raises:
        ValueError: the id names something that does not exist.
        OracleError: there is nothing to compare with.
    """
    check = checks.find(unit.check)
    trial = _trial(unit, bench)
    before = dataclasses.replace(trial.subject.calls)
    trial.subject.calls.refusal = ""
    world, started = World(bench.device), time.perf_counter()
    state, message = _run(check, trial)
    try:
        changed = world.changes()
    except RuntimeError as error:  # a kernel's fault, which came up only now or has lost the device before
        if bench.usable():
            raise
        changed, state, message = [], "failed", message or _described(error)
    if changed and state == "passed":
        # `Trial.call` looks at the subject's own calls: this was one of the forward or backward that it goes with.
        state, message = "failed", f"while this ran, global state changed and was left so: {'; '.join(changed)}"
    state, message, cause = _without_a_call(check, trial, before, state, message)
    outcome = Outcome(unit.id, state, bounded(message), trial.findings, trial.notes, cause=cause)
    outcome.seconds = time.perf_counter() - started
    return outcome


def _without_a_call(check: checks.Check, trial: Trial, before: Calls, state: str, message: str) -> tuple[str, str, str]:
    """State, message and cause of a unit in the light of the calls that were made: an implementation that cannot be
    bound claims nothing, and where it served no call there is nothing that passed."""
    subject, calls = trial.subject, trial.subject.calls
    if state != "not_claimed":
        with contextlib.suppress(BindError):  # which is in the snapshot then
            subject.manager.functions.bound(subject.operator, subject.id)
    unusable = subject.manager.snapshot.unusable.get(subject.id)
    if unusable is not None:
        return "not_claimed", unusable, REFUSED
    if state == "passed" and check.calls and not check.of_errors and calls.served == before.served:
        why = calls.refusal or "; ".join(trial.notes) or "none was made"
        state, message = "not_claimed", f"served no call: {why}"
    declined = state == "not_claimed" and calls.declined != before.declined
    return state, message, DECLINED if declined else ""


def _trial(unit: Unit, bench: Bench) -> Trial:
    if unit.case.space == RECORDED:
        return trial_of(bench.subject(unit), unit.case, bench.oracle)
    return Trial(bench.subject(unit), unit.case, bench.oracle)


def _run(check: checks.Check, trial: Trial) -> tuple[str, str]:
    try:
        check.run(trial)
    except NotClaimed as refusal:
        return "not_claimed", str(refusal)
    except Declined as declined:
        if trial.subject.operator.backward:
            return "failed", f"declined ({declined}): a backward must serve every call that it claims"
        return "not_claimed", f"declined: {declined}"
    except BindError as error:
        return "failed", str(error)
    except Failure as failure:
        return "failed", str(failure)
    except KitError as error:
        return "failed", f"the kit could not judge this, which is its mistake and not the implementation's: {error}"
    except OracleError:
        raise
    except (Exception, SystemExit) as error:
        return "failed", _described(error)
    return "passed", ""


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    where = " < ".join(f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})" for frame in frames[::-1])
    text = str(error)
    if len(text) > _BEGINNING + _END:
        text = f"{text[:_BEGINNING]} ... {text[-_END:]}"
    told = f"{type(error).__name__}: {text} [{where}]"
    return f"{told}; {_DECLINE}" if isinstance(error, NotImplementedError) else told
