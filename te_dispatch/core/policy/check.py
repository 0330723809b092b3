# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Contradictions inside one policy layer that can be told without a device or a call.

Across layers the same things are legitimate: a stronger layer may deny what a weaker one prefers.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from te_dispatch.core.errors import PolicyError
from te_dispatch.core.policy.known import Known
from te_dispatch.core.policy.model import NATIVE, TRAIT_PREFIX, Policy, Rule, Selector
from te_dispatch.core.requirements import Condition


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
    _check_order(policy.rules, known)


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


def _check_order(rules: Sequence[Rule], known: Known) -> None:
    """`prefer` and `allow` are taken from the first matching rule that has one; filters add up and stay reachable."""
    spoken_of = {op: frozenset(known.matched(op)) for op in {rule.op for rule in rules}}
    for key in ("prefer", "allow"):
        # Rules of one condition together: a later one is compared with each set of conditions and not with each rule.
        earlier: dict[frozenset[Condition], list[Rule]] = {}
        for rule in rules:
            if not (rule.prefer if key == "prefer" else rule.allow is not None):
                continue
            when = frozenset(rule.when)
            for narrower in _within(when, earlier):
                for first in earlier[narrower]:
                    if spoken_of[rule.op] <= spoken_of[first.op]:
                        raise _unreachable(rule, first, key)
            earlier.setdefault(when, []).append(rule)


def _within(when: frozenset[Condition], earlier: Collection[frozenset[Condition]]) -> list[frozenset[Condition]]:
    """Those sets of conditions that hold whenever `when` holds, as far as they name the same conditions."""
    if 2 ** len(when) > len(earlier):
        return [conditions for conditions in earlier if conditions <= when]
    subsets = (frozenset(s) for size in range(len(when) + 1) for s in itertools.combinations(when, size))
    return [conditions for conditions in subsets if conditions in earlier]


def _unreachable(rule: Rule, first: Rule, key: str) -> PolicyError:
    why = "has no 'when'" if not first.when else "matches whenever this one does"
    return PolicyError(
        f"{rule.origin}: the {key} of the rule for {rule.op!r} is never reached: the rule for {first.op!r} at "
        f"{first.origin} comes first and {why}; put the narrower rule first"
    )
