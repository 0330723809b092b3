# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Policies as data: what orders and filters candidates, and how layers of them merge.

Reading YAML is `te_dispatch.core.policy.file`'s business, reading the environment `te_dispatch.core.environment`'s.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from te_dispatch.core.requirements import Condition

#: In a list of selectors: every backend whose manifest declares the device's vendor.
NATIVE = "native"
TRAIT_PREFIX = "trait:"
#: The pseudo-backend of decompositions.
COMPOSITE = "composite"


@dataclass(frozen=True)
class Origin:
    """Where a line of policy came from: a file with its position, an environment variable, or a call."""

    source: str = "built in"
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        if self.line is None:
            return self.source
        return f"{self.source}:{self.line}" + (f":{self.column}" if self.column is not None else "")


BUILT_IN = Origin()


@dataclass(frozen=True)
class Selector:
    """One entry of prefer, allow, deny or require: ``native``, a backend, an implementation id, or ``trait:flash``."""

    text: str
    origin: Origin = field(default=BUILT_IN, compare=False)

    def matches(self, candidate_id: str, native: bool, traits: frozenset[str]) -> bool:
        if self.text == NATIVE:
            return native
        if self.text.startswith(TRAIT_PREFIX):
            return self.text[len(TRAIT_PREFIX) :] in traits
        if "." in self.text:
            return candidate_id == self.text
        return candidate_id.partition(".")[0] == self.text


@dataclass(frozen=True)
class Rule:
    """A part of a policy that speaks of some operators only, and under some conditions only.

    Attributes:
        op: an operator, a family, or a glob over either.
        when: all must hold; empty always holds. A condition on an unknown fact does not hold.
        prefer, allow, deny, require: as the policy's own, for the calls the rule matches. `prefer` of the first
            matching rule (strongest layer first) decides; filters of every matching rule apply.
    """

    op: str
    when: tuple[Condition, ...] = ()
    prefer: tuple[Selector, ...] = ()
    allow: tuple[Selector, ...] | None = None
    deny: tuple[Selector, ...] = ()
    require: tuple[Selector, ...] = ()
    origin: Origin = field(default=BUILT_IN, compare=False)

    def speaks_of(self, operator: str, family: str) -> bool:
        return fnmatch.fnmatchcase(operator, self.op) or fnmatch.fnmatchcase(family, self.op)


@dataclass(frozen=True)
class Numerics:
    """Numerical promises. None: this layer does not say.

    Attributes:
        fp8_portability: ``native`` (each device's full range) or ``common`` (equal codes on OCP and FNUZ devices).
        deterministic: only implementations that claim ``deterministic``.
        origins: where each promise that is set came from, by its name.
    """

    fp8_portability: str | None = None
    deterministic: bool | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Shadow:
    """Comparing a sample of a job's calls with another backend (`te_dispatch.core.shadow`).

    Attributes:
        against: the backend that is taken to be right; empty for no comparison at all (``shadow: off``).
        fraction: of the calls, in (0, 1]; the probability that a call is compared.
        on_mismatch: ``warn`` or ``raise``.
        ops: operators, families or globs over either; empty for all operators.
        directory: where offending inputs are written; None for a folder among the user's temporary files.
        limit: so many of them at most.
        origins: where each value that is written came from, by its name.
    """

    against: str
    fraction: float = 0.001
    on_mismatch: str = "warn"
    ops: tuple[str, ...] = ()
    directory: str | None = None
    limit: int = 16
    origin: Origin = field(default=BUILT_IN, compare=False)
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)

    @property
    def active(self) -> bool:
        return bool(self.against)

    def speaks_of(self, operator: str, family: str) -> bool:
        """Whether calls of an operator are compared."""
        matches = (fnmatch.fnmatchcase(name, pattern) for pattern in self.ops for name in (operator, family))
        return self.active and (not self.ops or any(matches))

    def as_data(self) -> dict[str, Any] | str:
        """Plain data for JSON, as a policy file has it."""
        if not self.active:
            return "off"
        return {
            "against": self.against,
            "fraction": self.fraction,
            "on_mismatch": self.on_mismatch,
            "ops": list(self.ops),
            "directory": self.directory,
            "limit": self.limit,
        }


@dataclass(frozen=True)
class Policy:
    """One layer, or the merger of all.

    Attributes:
        name: shown in decisions, e.g. a file's name.
        prefer: candidates in this order come first, after those of the first matching rule.
        allow: only these; None means no limit, an empty tuple none at all.
        deny: never these.
        require: groups of selectors; a candidate must match one of each group (a merged policy holds one per layer).
        rules: first match decides on `prefer`.
        optional_backends: backends that may be absent without an error.
        shadow: how calls are compared with another backend; None: this layer does not say.
    """

    name: str = "built in"
    description: str = ""
    prefer: tuple[Selector, ...] = ()
    allow: tuple[Selector, ...] | None = None
    deny: tuple[Selector, ...] = ()
    require: tuple[tuple[Selector, ...], ...] = ()
    rules: tuple[Rule, ...] = ()
    numerics: Numerics = Numerics()
    optional_backends: tuple[str, ...] = ()
    shadow: Shadow | None = None
    origin: Origin = field(default=BUILT_IN, compare=False)

    def digest(self) -> str:
        """Of everything that can change what is called; where lines came from does not."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.as_data(), sort_keys=True).encode()).hexdigest()[:16]

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON, without origins."""

        def texts(selectors: Sequence[Selector] | None) -> list[str] | None:
            return None if selectors is None else [s.text for s in selectors]

        shadow = {} if self.shadow is None else {"shadow": self.shadow.as_data()}
        return {
            "prefer": texts(self.prefer),
            "allow": texts(self.allow),
            "deny": texts(self.deny),
            "require": [texts(group) for group in self.require],
            "numerics": {
                "fp8_portability": self.numerics.fp8_portability,
                "deterministic": self.numerics.deterministic,
            },
            "rules": [
                {
                    "op": r.op,
                    "when": [c.describe() for c in r.when],
                    "prefer": texts(r.prefer),
                    "allow": texts(r.allow),
                    "deny": texts(r.deny),
                    "require": texts(r.require),
                }
                for r in self.rules
            ],
            **shadow,
        }


def merge(layers: Sequence[Policy]) -> Policy:
    """The effective policy of several layers, strongest first.

    `prefer` and `rules` concatenate, stronger first; `deny` and `require` accumulate; the strongest `allow` that is
    set wins; of each numerical promise the strongest that is set wins, and so does the strongest `shadow`.
    """

    def distinct(selectors: list[Selector]) -> tuple[Selector, ...]:
        return tuple(dict.fromkeys(selectors))

    allow = next((layer.allow for layer in layers if layer.allow is not None), None)
    portability = next((x.numerics.fp8_portability for x in layers if x.numerics.fp8_portability is not None), None)
    deterministic = next((x.numerics.deterministic for x in layers if x.numerics.deterministic is not None), None)
    return Policy(
        name=" + ".join(layer.name for layer in layers),
        description=layers[0].description if layers else "",
        prefer=distinct([s for layer in layers for s in layer.prefer]),
        allow=allow,
        deny=distinct([s for layer in layers for s in layer.deny]),
        require=tuple(group for layer in layers for group in layer.require),
        rules=tuple(rule for layer in layers for rule in layer.rules),
        numerics=Numerics(
            portability or "native",
            bool(deterministic),
            {name: where for layer in reversed(layers) for name, where in layer.numerics.origins.items()},
        ),
        optional_backends=tuple(dict.fromkeys(b for layer in layers for b in layer.optional_backends)),
        shadow=next((layer.shadow for layer in layers if layer.shadow is not None), None),
        origin=layers[0].origin if layers else BUILT_IN,
    )
