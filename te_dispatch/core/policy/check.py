# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Contradictions inside one policy layer that can be told without a device or a call.

Across layers the same things are legitimate: a stronger layer may deny what a weaker one prefers.
"""

from __future__ import annotations

from collections.abc import Sequence

from te_dispatch.core.errors import PolicyError
from te_dispatch.core.policy.known import Known
from te_dispatch.core.policy.model import NATIVE, TRAIT_PREFIX, Policy, Rule, Selector


def check_contradictions(policy: Policy, known: Known) -> None:
    """Check one layer, before it is merged with any other.

    Raises:
        PolicyError: at the line that cannot take effect.
    """
    for group in policy.require:
        _check_filters(policy.prefer, policy.allow, policy.deny, group)
    if not policy.require:
        _check_filters(policy.prefer, policy.allow, policy.deny, ())
    for rule in policy.rules:
        _check_filters(rule.prefer, rule.allow, (*rule.deny, *policy.deny), rule.require)
        if rule.allow is None:
            _check_allowed(rule.require, policy.allow)
    for index, rule in enumerate(policy.rules):
        for earlier in policy.rules[:index]:
            _check_reachable(earlier, rule, known)


def _check_filters(
    prefer: Sequence[Selector],
    allow: Sequence[Selector] | None,
    deny: Sequence[Selector],
    require: Sequence[Selector],
) -> None:
    for key, selectors in (("prefer", prefer), ("allow", allow or ()), ("require", require)):
        for selector in selectors:
            denial = next((d for d in deny if _covers(d, selector)), None)
            if denial is not None:
                raise PolicyError(
                    f"{selector.origin}: {key} names {selector.text!r}, but deny removes it ({denial.text!r} at "
                    f"{denial.origin})"
                )
    _check_allowed(require, allow)


def _check_allowed(require: Sequence[Selector], allow: Sequence[Selector] | None) -> None:
    """A required selector must be able to match something that is allowed; native and traits cannot be told."""
    if allow is None or any(_open(s) for s in allow):
        return
    for selector in require:
        if not _open(selector) and not any(_covers(a, selector) or _covers(selector, a) for a in allow):
            listed = ", ".join(a.text for a in allow) or "nothing"
            raise PolicyError(f"{selector.origin}: require names {selector.text!r}, but only {listed} is allowed")


def _open(selector: Selector) -> bool:
    return selector.text == NATIVE or selector.text.startswith(TRAIT_PREFIX)


def _covers(wide: Selector, narrow: Selector) -> bool:
    """Whether all that `narrow` matches is matched by `wide`, as far as the texts tell."""
    if _open(wide) or _open(narrow):
        return wide.text == narrow.text
    return wide.text in (narrow.text, narrow.text.partition(".")[0])


def _check_reachable(earlier: Rule, later: Rule, known: Known) -> None:
    """`prefer` and `allow` are taken from the first matching rule that has one; filters add up and stay reachable."""
    if not set(known.matched(later.op)) <= set(known.matched(earlier.op)):
        return
    if not set(earlier.when) <= set(later.when):
        return
    ordered = bool(later.prefer and earlier.prefer)
    if ordered or (later.allow is not None and earlier.allow is not None):
        why = "has no 'when'" if not earlier.when else "matches whenever this one does"
        key = "prefer" if ordered else "allow"
        raise PolicyError(
            f"{later.origin}: the {key} of the rule for {later.op!r} is never reached: the rule for {earlier.op!r} at "
            f"{earlier.origin} comes first and {why}; put the narrower rule first"
        )
