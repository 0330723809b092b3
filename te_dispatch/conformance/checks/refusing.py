# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls for which the contract asks for an error: it is raised, names an argument, and nothing was written before."""

from __future__ import annotations

import re

from te_dispatch.conformance.checks import Check, anywhere
from te_dispatch.conformance.checks.values import changed_inputs, synchronize
from te_dispatch.conformance.space import Arguments
from te_dispatch.conformance.transfer import tensors
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.errors import Declined


def raises(trial: Trial) -> None:
    """`Space.raises` comes out of the call and names one of the operator's arguments, each of which is what it was."""
    wanted = trial.space.raises
    assert wanted is not None
    arguments = trial.on_device()
    trial.claim(arguments)
    require_refusal(trial, arguments, wanted)


def require_refusal(trial: Trial, arguments: Arguments, wanted: type[Exception]) -> None:
    """Call, and see that an error comes, that it names an argument, and that nothing was written before.

    Raises:
        Failure: it does not.
        Declined: by the implementation.
    """
    before = {path: tensor.detach().clone() for path, tensor in tensors(dict(arguments))}
    try:
        trial.call(arguments)
        synchronize(trial)
    except Declined:
        raise
    except wanted as error:
        names = trial.subject.operator.signature.parameters
        if names.keys().isdisjoint(re.findall(r"\w+", str(error))):
            raise Failure(f"raised {wanted.__name__} without the name of an argument: {error}") from None
        changed = changed_inputs(before, arguments)
        if changed:
            raise Failure(f"raised {wanted.__name__}, but had changed {', '.join(changed)}") from None
        return
    raise Failure(f"returned, where the contract asks for {wanted.__name__}")


CHECKS = (Check("raises", raises, anywhere, None, None, "the error that the contract asks for", of_errors=True),)
