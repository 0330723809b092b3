# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls for which the contract asks for an error: it is raised, names the argument, and nothing was written before."""

from __future__ import annotations

import re

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.values import changed_inputs, synchronize
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import moved, tensors
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.errors import BindError, Declined


def raises(trial: Trial) -> None:
    """`Space.raises` comes out of the call and names the argument; each argument is what it was."""
    wanted = trial.space.raises
    assert wanted is not None
    arguments = trial.on_device()
    trial.claim(arguments)
    require_refusal(trial, arguments, wanted)


def named(trial: Trial, error: Exception) -> set[str]:
    """The operator's parameters that an error's message names."""
    return set(re.findall(r"\w+", str(error))) & trial.subject.operator.signature.parameters.keys()


def named_by_oracles(trial: Trial, arguments: Arguments) -> set[str]:
    """The parameters that the oracle's errors of a call name; empty where it raises none."""
    names = set()
    for oracle in trial.oracle.subjects(trial.space.operator):
        try:
            oracle.call(moved(arguments, "cpu"))
        except Exception as error:
            names |= named(trial, error)
    return names


def require_refusal(trial: Trial, arguments: Arguments, wanted: type[Exception], changed: str | None = None) -> None:
    """Call, and see that an error comes, that it names the argument, and that nothing was written before.

    Arguments that do not fit together may be named each: those count that the oracle's error names.

    Args:
        changed: the argument that makes the call wrong, where it is known.

    Raises:
        Failure: it does not.
        Declined: by the implementation.
    """
    before = {path: tensor.detach().clone() for path, tensor in tensors(dict(arguments))}
    try:
        trial.call(arguments)
        synchronize(trial)
    except (Declined, BindError, Failure):
        raise
    except wanted as error:
        names = named(trial, error)
        if not names:
            asked = _asked(trial, arguments, wanted, changed)
            raise Failure(f"raised an error that names no argument, expected {asked}: {error}") from None
        if changed not in names:
            expected = named_by_oracles(trial, arguments)
            if expected and names.isdisjoint(expected):
                raise Failure(
                    f"raised {wanted.__name__}, expected it to name {_listed(expected, changed)}: {error}"
                ) from None
        written = changed_inputs(before, arguments)
        if written:
            raise Failure(f"raised {wanted.__name__}, but had changed {', '.join(written)}") from None
        return
    except Exception as error:
        asked = _asked(trial, arguments, wanted, changed)
        raise Failure(f"raised {type(error).__name__}, where the contract asks for {asked}: {error}") from error
    raise Failure(f"returned, where the contract asks for {_asked(trial, arguments, wanted, changed)}")


def _asked(trial: Trial, arguments: Arguments, wanted: type[Exception], changed: str | None) -> str:
    """The error that a call must raise, in words."""
    names = named_by_oracles(trial, arguments)
    listed = _listed(names, changed if changed in names or not names else None)
    return wanted.__name__ + (f" that names {listed}" if listed else "")


def _listed(names: set[str], changed: str | None) -> str:
    return " or ".join(sorted(names | ({changed} if changed else set())))


def _applies(subject: Subject, space: Space) -> str | None:
    if space.contents and subject.device.type != "cpu":
        return "tensors' contents are looked at on the host alone"
    return None


CHECKS = (Check("raises", raises, _applies, None, None, "the error that the contract asks for", of_errors=True),)
