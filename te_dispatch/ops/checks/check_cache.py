# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A cache in front of a check: which calls passed, because a model makes the same calls in every step.

`cached_check` wraps a check. The wrapper collects the signature of a call (`signatures`), finds the passes with the
same facts, and compares the tensors' class, shape, dtype and device with those that passed. Where nothing fits the
check runs, so a wrong call gets the check's own error: only passes are cached, and no tensor is kept.

Signatures cover everything that a check may read, and nothing of what tensors contain. So whoever writes a check

- names the operator, and calls arguments as it does,
- says which tensors' contents it looks into (`CONTENTS`), and reads nothing else that the kinds do not cover.

`tests/bad_input/test_check_cache.py` makes each declared call invalid in many ways and compares with the check.

The wrapper is generated with the check's exact parameters, because a loop over the arguments would cost more than
most checks. The check itself stays reachable as `__wrapped__`, the passes as `passed`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from te_dispatch.core.bounded import RecentDict
from te_dispatch.ops.checks.guards import guard_for, is_plain
from te_dispatch.ops.checks.signatures import Kind, code_of, compiled, kinds_of, look_of, tensors_of

P = ParamSpec("P")
R = TypeVar("R")

#: Sets of facts that one check remembers, and passes with the same facts (tensors of other dtypes, say).
#: A model makes some tens of different calls; one takes about 2 KiB.
CAPACITY, PASSES = 1024, 8


def cached_check(operator: str = "", **exceptions: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a check: ``@cached_check("quantize")``.

    Args:
        operator, exceptions: as `signatures.kinds_of` takes them.
    """

    def wrap(check: Callable[P, R]) -> Callable[P, R]:
        return _wrapper(check, kinds_of(check, operator, exceptions))

    return wrap


#: In a wrapper, `recent` are the entries of `passed` that were used last.
_WRAPPER = """
def make(check, recent, learn):
    def {name}({names}):
        if is_dynamo_compiling():
            return check({names})
        try:
            {body}
        except Exception:  # new facts, or something of a kind that was not foreseen: the check shall say
            pass
        return learn(({names},))

    return {name}
"""
_FIND = """\
for fits, result in recent[({facts})]:
    if fits({tensors}):
        return result"""


def _wrapper(check: Callable[P, R], arguments: dict[str, Kind]) -> Callable[P, R]:
    passed: RecentDict[Any, Any] = RecentDict(CAPACITY)
    code, name = code_of(arguments), check.__name__
    learn = functools.partial(_learn, check, tuple(arguments.values()), passed, look_of(code, name))
    source = _WRAPPER.format(name=name, names=code.names, body=code.text(_FIND, 12))
    wrapper = compiled(source, f"cached check {name}", check=check, recent=passed.recent, learn=learn)
    functools.update_wrapper(wrapper, check)
    wrapper.__defaults__ = check.__defaults__
    wrapper.passed = passed
    return wrapper  # type: ignore[no-any-return]


def _learn(
    check: Callable[..., Any],
    looks: Sequence[Kind],
    passed: RecentDict[Any, Any],
    look: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    """The result of a call that is not among the recent ones: an older one's, or the check's. If the call passes and
    what was looked at is all that this depends on, the result is cached."""
    facts = tensors = passes = None
    # The check runs after the handler, so that its errors have no other as their context.
    with contextlib.suppress(Exception):  # nothing that a kind foresees: checked every time
        facts, tensors = look(*arguments)
        passes = passed.get(facts, ())
        for fits, result in passes:
            if fits(*tensors):
                return result
    result = check(*arguments)
    if tensors is None or passes is None:
        return result
    given = [(kind, x) for kind, x in zip(looks, arguments) if x is not None]
    if torch.compiler.is_compiling() or not all(kind.lasting(x) for kind, x in given):
        return result
    if not all(map(is_plain, tensors)):
        return result
    written = {id(t) for kind, x in given if kind.strides for t in tensors_of(x)}
    # A new list: another thread may be going through the old one.
    passed[facts] = [(guard_for(tensors, [id(t) in written for t in tensors]), result), *passes[: PASSES - 1]]
    return result
