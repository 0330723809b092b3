# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The words a policy may use on this machine, and what is wrong with a word that is none of them.

A policy is written once for every node of a cluster, so absence is not an error: first-party backends, and those
under ``optional_backends``, are known whether or not they are installed. What is installed is checked to the letter.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from te_dispatch.core.manifest import TRAITS, Implementation, Manifest
from te_dispatch.core.operator import Fact, Operator
from te_dispatch.core.policy.model import COMPOSITE, NATIVE, TRAIT_PREFIX
from te_dispatch.core.requirements import DEVICE_PREFIX, NoneOf, OneOf, atoms

FIRST_PARTY_BACKENDS = ("cuda", "reference", "rocm", "torch", "triton")
FIRST_PARTY_VENDORS = ("amd", "cpu", "nvidia")

DEVICE_FACTS = (
    "type",
    "vendor",
    "arch",
    "name",
    "index",
    "encodings",
    "fp8_matmul",
    "fp8_layouts",
    "block_scaled_matmul",
    "warp_size",
    "memory",
)
#: PyTorch's own; a plugin may bring another.
DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "meta", "privateuseone")
#: Facts such as ``version.cudnn``: any library may have one.
VERSION_PREFIX = "version."

DTYPES = (
    *("fp64", "fp32", "bf16", "fp16", "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1", "e8m0"),
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)


def did_you_mean(word: str, valid: Collection[str], *, listing: bool = True) -> str:
    """``"; did you mean 'x'?"``, or the valid words where none is near and they are few."""
    import difflib  # only a policy with a mistake pays for it

    near = difflib.get_close_matches(word, list(valid), n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(sorted(valid))}" if listing and 0 < len(valid) <= 16 else ""


@dataclass(frozen=True)
class Known:
    """What manifests and operators declare, in the form in which policies speak of it.

    Attributes:
        operators: name -> version.
        families: name -> its operators.
        companions: operator -> its companion.
        facts: operator -> call fact -> kind (``dtype``, ``size``, ``option``).
        words: operator -> option -> the values it can have; options that can have any are left out.
        backends: installed backend -> ids of its implementations; `COMPOSITE` is one of them.
        serves: implementation id -> operators.
        claims, traits_of: implementation id -> claims, traits.
        vendors: vendor -> archs. Empty where no installed manifest has a table of them.
        traits: of all implementations.
        dtypes: words a dtype fact can be.
        device_facts: names without ``device.``.
        device_types: PyTorch's, and those of installed backends.
    """

    operators: Mapping[str, int]
    families: Mapping[str, tuple[str, ...]]
    companions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, tuple[str | bool | None, ...]]] = field(default_factory=dict)
    backends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    serves: Mapping[str, frozenset[str]] = field(default_factory=dict)
    claims: Mapping[str, frozenset[str]] = field(default_factory=dict)
    traits_of: Mapping[str, frozenset[str]] = field(default_factory=dict)
    vendors: Mapping[str, frozenset[str]] = field(default_factory=dict)
    traits: frozenset[str] = frozenset(TRAITS)
    dtypes: frozenset[str] = frozenset(DTYPES)
    device_facts: frozenset[str] = frozenset(DEVICE_FACTS)
    device_types: frozenset[str] = frozenset(DEVICE_TYPES)

    @classmethod
    def of(cls, manifests: Iterable[Manifest], operators: Mapping[str, Operator]) -> Known:
        """From the manifests of what is installed and `te_dispatch.core.operator.OPERATORS`."""
        manifests = tuple(manifests)
        implementations = [(m.name, i) for m in manifests for i in m.implementations]
        backends = {m.name: tuple(f"{m.name}.{i.name}" for i in m.implementations) for m in manifests}
        serves: dict[str, set[str]] = {}
        for backend, implementation in implementations:
            serves.setdefault(f"{backend}.{implementation.name}", set()).add(implementation.operator)
        for operator in operators.values():
            for decomposition in operator.decompositions:
                serves.setdefault(f"{COMPOSITE}.{decomposition.name}", set()).add(operator.name)
        backends[COMPOSITE] = tuple(name for name in serves if name.startswith(f"{COMPOSITE}."))
        required = [i for _, i in implementations]
        return cls(
            operators={o.name: o.version for o in operators.values()},
            families=_families(operators),
            companions={o.name: o.companion for o in operators.values() if o.companion},
            facts={o.name: {f.name: f.kind for f in o.facts.values()} for o in operators.values()},
            words={o.name: {f.name: w for f in o.facts.values() if (w := _words(f))} for o in operators.values()},
            backends=backends,
            serves={name: frozenset(found) for name, found in serves.items()},
            claims={f"{b}.{i.name}": i.claims for b, i in implementations},
            traits_of={f"{b}.{i.name}": i.traits for b, i in implementations},
            vendors=_vendors(manifests),
            traits=frozenset(TRAITS).union(*(i.traits for i in required)),
            dtypes=frozenset(DTYPES).union(_encodings(manifests), _required_dtypes(required, operators)),
            device_facts=frozenset(DEVICE_FACTS) | _required_device_facts(required),
            device_types=frozenset(DEVICE_TYPES).union(*(m.devices for m in manifests)),
        )

    def matched(self, pattern: str) -> tuple[str, ...]:
        """Operators that a rule's ``op`` speaks of, itself or through their family."""
        return tuple(
            operator
            for family, members in self.families.items()
            for operator in members
            if fnmatch.fnmatchcase(operator, pattern) or fnmatch.fnmatchcase(family, pattern)
        )

    def with_companions(self, operators: Iterable[str]) -> frozenset[str]:
        """A rule that speaks of one companion speaks of both."""
        named = frozenset(operators)
        return named | {self.companions[o] for o in named if o in self.companions}

    def operator_problem(self, op: str) -> str | None:
        """What is wrong with a rule's ``op``, or None."""
        pattern, at, version = op.partition("@")
        matched = self.matched(pattern)
        if not matched:
            what = "matches no operator and no family" if _is_glob(pattern) else "is no operator and no family"
            return f"{pattern!r} {what}{did_you_mean(pattern, {*self.operators, *self.families})}"
        if not at:
            return None
        # "gemm" is a family as well, but with a version it can only mean the operator.
        named = (pattern,) if pattern in self.operators else matched
        others = [o for o in named if str(self.operators[o]) != version]
        if others:
            there = ", ".join(f"{o}@{self.operators[o]}" for o in others[:4])
            return f"{op!r} names a version that does not exist; there is {there}"
        return None

    def selector_problem(
        self, text: str, optional: Collection[str] = (), operators: Collection[str] | None = None
    ) -> str | None:
        """What is wrong with an entry of prefer, allow, deny or require, or None.

        Args:
            text: the entry.
            optional: backends that may be absent.
            operators: those the entry can apply to; None for all.
        """
        if text.startswith(TRAIT_PREFIX):
            trait = text[len(TRAIT_PREFIX) :]
            return None if trait in self.traits else f"unknown trait {trait!r}{did_you_mean(trait, self.traits)}"
        backend, dot, _ = text.partition(".")
        known = {*FIRST_PARTY_BACKENDS, *self.backends, *optional}
        if backend not in known:
            if not dot:
                return f"unknown backend {text!r}{did_you_mean(text, {NATIVE, *known})}" if text != NATIVE else None
            return f"unknown backend {backend!r} in {text!r}{did_you_mean(backend, known)}"
        if not dot or backend not in self.backends:
            return None  # of a backend that is absent, every implementation may exist
        if text not in self.serves:
            return f"backend {backend!r} has no implementation {text!r}{did_you_mean(text, self.backends[backend])}"
        if operators is not None and not self.serves[text] & set(operators):
            return f"{text!r} implements {', '.join(sorted(self.serves[text]))}, which this rule does not speak of"
        return None

    def backend_problem(self, name: str, optional: Collection[str] = ()) -> str | None:
        """What is wrong with the name of one backend, or None. It need not be installed."""
        known = {*FIRST_PARTY_BACKENDS, *self.backends, *optional} - {COMPOSITE}
        return None if name in known else f"unknown backend {name!r}{did_you_mean(name, known)}"

    def vendor_problem(self, vendor: str, optional: Collection[str] = ()) -> str | None:
        if vendor in self.vendors:
            return None
        hint = did_you_mean(vendor, self.vendors, listing=False)
        # The vendor of an absent optional backend cannot be known; only what looks like a slip is refused.
        if not hint and any(name not in self.backends for name in optional):
            return None
        return f"unknown vendor {vendor!r}{did_you_mean(vendor, self.vendors)}"

    def arch_problem(self, arch: str, vendors: Collection[str]) -> str | None:
        """What is wrong with an arch on devices of `vendors` (all, where empty), or None."""
        asked = [v for v in self.vendors if v in vendors] if vendors else list(self.vendors)
        if any(arch in self.vendors[v] for v in asked):
            return None
        # A vendor without a table (its backends are not installed here) may have any arch.
        if not asked or any(not self.vendors[v] for v in asked):
            return None
        listed = {a for v in asked for a in self.vendors[v]}
        whose = f" of {' or '.join(asked)}" if vendors else ""
        return f"unknown arch {arch!r}{whose}{did_you_mean(arch, listed)}"


def _words(fact: Fact) -> tuple[str | bool | None, ...]:
    if fact.presence:
        return (False, True)
    return (None, False, True) if fact.boolean else (*fact.words, None) if fact.words else ()


def _is_glob(pattern: str) -> bool:
    return any(c in pattern for c in "*?[")


def _families(operators: Mapping[str, Operator]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for operator in operators.values():
        found[operator.family] = (*found.get(operator.family, ()), operator.name)
    return found


def _vendors(manifests: Iterable[Manifest]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {vendor: frozenset() for vendor in FIRST_PARTY_VENDORS}
    for manifest in manifests:
        for vendor in manifest.vendors:
            found.setdefault(vendor, frozenset())
        for vendor, archs in manifest.archs.items():
            found[vendor.lower()] = found.get(vendor.lower(), frozenset()) | frozenset(archs)
    # DeviceFacts describes the host with its arch spelled like its vendor.
    found["cpu"] |= {"cpu"}
    return found


def _encodings(manifests: Iterable[Manifest]) -> set[str]:
    return {e for m in manifests for archs in m.archs.values() for arch in archs.values() for e in arch.encodings}


def _required_dtypes(implementations: Iterable[Implementation], operators: Mapping[str, Operator]) -> set[str]:
    """Words that manifests compare dtype facts with: a plugin may bring a format of its own."""
    found: set[str] = set()
    for implementation in implementations:
        operator = operators.get(implementation.operator)
        for condition in implementation.requires if operator else ():
            for atom in atoms(condition):
                fact = operator.facts.get(atom.fact) if operator else None
                if isinstance(atom, (OneOf, NoneOf)) and fact is not None and fact.kind == "dtype":
                    found |= {v for v in atom.values if isinstance(v, str)}
    return found


def _required_device_facts(implementations: Iterable[Implementation]) -> frozenset[str]:
    reads = [name for i in implementations for condition in i.requires for name in condition.reads()]
    return frozenset(name[len(DEVICE_PREFIX) :] for name in reads if name.startswith(DEVICE_PREFIX))
