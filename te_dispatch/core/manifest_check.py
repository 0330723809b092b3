# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is wrong with a manifest: the type of every field, and the words that its requirements use.

A manifest is written by people who do not have this source at hand, and a misspelt word makes a requirement either
vacuous or impossible. Every answer therefore names the place, what stands there and what is expected, with the
nearest known word. New words of a vendor's own (an encoding, a device fact) are accepted; what looks like a known word
written wrongly is not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from te_dispatch.core.contradictions import contradiction
from te_dispatch.core.facts import Arch, arch_number
from te_dispatch.core.manifest import API_VERSIONS, CLAIMS, TRAITS, Implementation, Manifest
from te_dispatch.core.operator import Fact, Operator
from te_dispatch.core.policy.known import DEVICE_FACTS, DTYPES, FIRST_PARTY_VENDORS, VERSION_PREFIX, did_you_mean
from te_dispatch.core.requirements import (
    DEVICE_PREFIX,
    All,
    AnyOf,
    Compare,
    Condition,
    MultipleOf,
    NoneOf,
    OneOf,
    OnVendor,
    atoms,
    version_tuple,
)

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TARGET = re.compile(r"[\w.]+:[\w.]+")
_RESERVED = ("native", "composite")

#: How others write the dtypes of this project.
_OTHER_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "float8": "e4m3fn",
    "fp8": "e4m3fn",
}
_LAYOUTS = ("NT", "NN", "TN")
_BLOCK_SCALED = ("mxfp8", "nvfp4")
#: How alike an unknown word must be to a known one to count as that word misspelt.
_ALIKE = 0.75

Atom = OneOf | NoneOf | Compare | MultipleOf


def check_manifest(manifest: object, entry_point_name: str) -> str | None:
    """What is wrong with a manifest as a whole, or None."""
    if not isinstance(manifest, Manifest):
        return f"its entry point is {type(manifest).__name__}, not a te_dispatch.core.manifest.Manifest"
    if isinstance(manifest.api_version, bool) or manifest.api_version not in API_VERSIONS:
        spoken = " and ".join(map(str, API_VERSIONS))
        return f"api_version is {manifest.api_version!r}, this te_dispatch speaks {spoken}"
    if not isinstance(manifest.name, str) or not _NAME.fullmatch(manifest.name):
        return f"its name {manifest.name!r} must be lower-case letters, digits and underscores"
    if manifest.name != entry_point_name:
        return f"the manifest is named {manifest.name!r}, the entry point {entry_point_name!r}; they must agree"
    if manifest.name in _RESERVED:
        return f"the name {manifest.name!r} is reserved"
    problem = next(_field_problems(manifest), None)
    if problem is not None:
        return problem
    seen: set[str] = set()
    for implementation in manifest.implementations:
        if not isinstance(implementation, Implementation):
            return f"implementations holds {type(implementation).__name__}, not Implementation"
        where = f"implementation {implementation.name!r}"
        problem = next(_implementation_problems(implementation, manifest.api_version), None)
        if problem is not None:
            return f"{where}: {problem}"
        if implementation.name in seen:
            return f"{where} is declared twice; names are unique within a backend"
        seen.add(implementation.name)
    return None


def _field_problems(manifest: Manifest) -> Iterator[str]:
    for vendor in manifest.vendors:
        if not isinstance(vendor, str) or not re.fullmatch(r"[^\s:]+", vendor):
            yield f"vendors holds {vendor!r}, which is no vendor's name"
    if not isinstance(manifest.devices, Mapping):
        yield f"devices is {_shown(manifest.devices)}, not a dict of device type -> 'module:function'"
        return
    for type_, target in manifest.devices.items():
        if not isinstance(type_, str) or not _is_target(target):
            yield f"devices[{type_!r}] must read 'module:function', got {target!r}"
    yield from _emulator_problems(manifest.emulators)
    for name in ("doctor", "unavailable"):
        target = getattr(manifest, name)
        if target is not None and not _is_target(target):
            yield f"{name} must read 'module:function', got {target!r}"
    if not isinstance(manifest.description, str):
        yield f"description must be a str, got {manifest.description!r}"
    yield from _arch_problems(manifest.archs)


def _emulator_problems(emulators: object) -> Iterator[str]:
    if not isinstance(emulators, Mapping):
        yield f"emulators is {_shown(emulators)}, not a dict of 'vendor:arch' -> 'module:function'"
        return
    for label, target in emulators.items():
        if not isinstance(label, str) or not re.fullmatch(r"[^\s:]+:[^\s:]+", label) or not _is_target(target):
            yield f"emulators[{label!r}] must read 'vendor:arch': 'module:function', got {target!r}"


def _is_target(value: object) -> bool:
    return isinstance(value, str) and _TARGET.fullmatch(value) is not None


def _shown(value: object) -> str:
    return f"the {type(value).__name__} {value!r}"


def _arch_problems(archs: object) -> Iterator[str]:
    if not isinstance(archs, Mapping):
        yield f"archs is {_shown(archs)}, not a dict of vendor -> dict of arch -> Arch"
        return
    for vendor, rows in archs.items():
        where = f"archs[{vendor!r}]"
        if not isinstance(vendor, str) or not isinstance(rows, Mapping):
            yield f"{where} is {_shown(rows)}, not a dict of arch -> Arch"
            return
        for name, arch in rows.items():
            if not isinstance(name, str) or not isinstance(arch, Arch):
                yield f"{where}[{name!r}] is {_shown(arch)}, not an Arch"
            else:
                problem = arch_problem(arch)
                if problem is not None:
                    yield f"{where}[{name!r}]: {problem}"


def arch_problem(arch: Arch) -> str | None:
    """What is wrong with one row of an arch table, or None."""
    for field, known, strict in (
        ("encodings", DTYPES, False),
        ("fp8_layouts", _LAYOUTS, True),
        ("block_scaled_matmul", _BLOCK_SCALED, True),
    ):
        words = getattr(arch, field)
        if isinstance(words, str) or not isinstance(words, Collection):
            return f"{field} is {_shown(words)}, not a tuple of words"
        for word in words:
            if not isinstance(word, str):
                return f"{field} holds {word!r}, not a word"
            problem = _word_problem(word, known, strict)
            if problem is not None:
                return f"{field}: {problem}"
    if not isinstance(arch.fp8_matmul, bool):
        return f"fp8_matmul must be True or False, got {arch.fp8_matmul!r}"
    if isinstance(arch.warp_size, bool) or not isinstance(arch.warp_size, int) or arch.warp_size < 1:
        return f"warp_size must be a positive int, got {arch.warp_size!r}"
    return None


def _word_problem(word: str, known: Collection[str], strict: bool) -> str | None:
    """What is wrong with a word. Where it is not `strict`, only what looks like a known word written wrongly is."""
    if word in known:
        return None
    if word in ("None", "True", "False"):
        return f"{word!r} is a word; write {word}, without quotes"
    if known is DTYPES and word in _OTHER_NAMES:
        return f"unknown word {word!r}; it is called {_OTHER_NAMES[word]!r} here"
    if strict:
        return f"unknown word {word!r}{did_you_mean(word, known)}"
    near = _near(word, known)
    return f"unknown word {word!r}; did you mean {near!r}?" if near else None


def _near(word: str, known: Collection[str]) -> str | None:
    import difflib  # only a manifest with a new word pays for it

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=_ALIKE)), None)


def _implementation_problems(implementation: Implementation, api_version: int) -> Iterator[str]:
    if not isinstance(implementation.name, str) or not _NAME.fullmatch(implementation.name):
        yield "the name must be lower-case letters, digits and underscores"
    for condition in implementation.requires:
        if not _is_condition(condition):
            yield f"requires holds {condition!r}, which is no condition of te_dispatch.core.requirements"
    if isinstance(implementation.rank, bool) or not isinstance(implementation.rank, int):
        yield f"rank must be a whole number, got {implementation.rank!r}"
    if not isinstance(implementation.op, str) or not re.fullmatch(r"[A-Za-z_]\w*@\d+", implementation.op):
        yield f"op must read 'operator@version', got {implementation.op!r}"
    if not _is_target(implementation.target):
        yield f"target must read 'module:attribute', got {implementation.target!r}"
    for name in ("plan", "operand_format", "output_shape"):
        target = getattr(implementation, name)
        if target is None:
            continue
        if not _is_target(target):
            yield f"{name} must read 'module:function', got {target!r}"
        if api_version < 2:
            yield f"{name} is part of api_version 2, the manifest says {api_version}"
    if implementation.operand_format is not None and not implementation.operator.endswith("gemm"):
        yield f"operand_format is of gemm and grouped_gemm, not of {implementation.operator}"
    for kind, given, known in (("claim", implementation.claims, CLAIMS), ("trait", implementation.traits, TRAITS)):
        for word in sorted(given - set(known), key=str):
            yield f"unknown {kind} {word!r}; known: {', '.join(known)}"
    for name in ("saved_format", "version"):
        if not isinstance(getattr(implementation, name), str):
            yield f"{name} must be a str, got {getattr(implementation, name)!r}"
    if not isinstance(implementation.inference, bool):
        yield f"inference must be True or False, got {implementation.inference!r}"


def _is_condition(value: object) -> bool:
    # A subclass could raise, or compile to an expression of its own, in calls of everybody.
    if type(value) in (All, AnyOf):
        return all(_is_condition(part) for part in value.parts)  # type: ignore[attr-defined]
    if type(value) is OnVendor:
        return isinstance(value.vendor, str) and _is_condition(value.condition)
    return type(value) in (OneOf, NoneOf, Compare, MultipleOf)


# -- against the operators of this te_dispatch ------------------------------------------------------------------------


def operator_problems(manifest: Manifest, operators: Mapping[str, Operator]) -> dict[str, str]:
    """Implementation id -> why it cannot be used: an operator or version that this runtime does not have, or a
    requirement that could never hold, or always would, because a word in it is none of the operator's, or
    requirements that can never hold together."""
    problems: dict[str, str] = {}
    vendors = {*FIRST_PARTY_VENDORS, *manifest.vendors, *(v.lower() for v in manifest.archs)}
    for implementation in manifest.implementations:
        operator = operators.get(implementation.operator)
        candidate = f"{manifest.name}.{implementation.name}"
        if operator is None:
            hint = did_you_mean(implementation.operator, operators)
            problems[candidate] = f"operator {implementation.operator!r} does not exist in this te_dispatch{hint}"
        elif operator.version != implementation.operator_version:
            problems[candidate] = (
                f"written for {implementation.op}, this te_dispatch has {operator.name}@{operator.version}"
            )
        else:
            problem = next(_requirement_problems(implementation.requires, operator, vendors), None)
            problem = problem or contradiction(implementation.requires, operator.facts)
            if problem is not None:
                problems[candidate] = problem
    return problems


def _requirement_problems(
    requires: tuple[Condition, ...], operator: Operator, vendors: Collection[str]
) -> Iterator[str]:
    for condition in requires:
        for atom in atoms(condition):
            if atom.fact.startswith(DEVICE_PREFIX):
                problem = _device_problem(atom, atom.fact[len(DEVICE_PREFIX) :], vendors)
            elif atom.fact in operator.facts:
                problem = _fact_problem(atom, operator.facts[atom.fact])
            else:
                hint = _near(atom.fact, operator.facts)
                problem = f"requires a fact that {operator.name} does not have: {atom.fact}"
                problem += f"; did you mean {hint!r}?" if hint else ""
            if problem is not None:
                yield problem


def _device_problem(atom: Atom, name: str, vendors: Collection[str]) -> str | None:
    where = f"requires {atom.describe()!r}"
    if name.startswith(VERSION_PREFIX):
        if isinstance(atom, Compare) and (not isinstance(atom.bound, str) or not version_tuple(atom.bound)):
            return f"{where}: a version compares with a version, such as '9.10', got {atom.bound!r}"
        return None
    if name not in DEVICE_FACTS:
        near = _near(name, (*DEVICE_FACTS, *(f"{VERSION_PREFIX}{library}" for library in ("torch", "cuda", "triton"))))
        return f"{where}: there is no device fact {name!r}; did you mean {near!r}?" if near else None
    if name == "arch":
        if isinstance(atom, Compare) and (not isinstance(atom.bound, str) or arch_number(atom.bound) is None):
            return f"{where}: {atom.bound!r} has no number to compare archs by"
        return None
    if not isinstance(atom, (OneOf, NoneOf)):
        sized = name in ("index", "memory", "warp_size") and not isinstance(getattr(atom, "bound", 0), str)
        return None if sized else f"{where}: device.{name} does not compare; list values with OneOf"
    known, strict = {
        "vendor": (vendors, False),
        "encodings": (DTYPES, False),
        "fp8_layouts": (_LAYOUTS, True),
        "block_scaled_matmul": (_BLOCK_SCALED, True),
    }.get(name, ((), False))
    return _value_problem(where, atom, bool if name == "fp8_matmul" else None, known, strict)


def _fact_problem(atom: Atom, fact: Fact) -> str | None:
    where = f"requires {atom.describe()!r}"
    if isinstance(atom, (OneOf, NoneOf)):
        if fact.kind == "size":
            below = [v for v in atom.values if isinstance(v, int) and v < 0]
            problem = _value_problem(where, atom, int)
            return problem or (f"{where}: {fact.name} is a size, got {below[0]}" if below else None)
        if fact.kind == "dtype":
            return _value_problem(where, atom, str, DTYPES)
        wrong = [v for v in atom.values if fact.boolean and v is not None and not isinstance(v, bool)]
        if wrong:
            return f"{where}: {fact.name} is True or False, got {wrong[0]!r}"
        return _value_problem(where, atom, bool if fact.presence else None, fact.words, True)
    if fact.kind == "dtype" or fact.words or fact.presence:
        return f"{where}: {fact.name} does not compare; list values with OneOf"
    if fact.kind == "size" and isinstance(atom, Compare) and isinstance(atom.bound, str):
        return f"{where}: compares with a number, got {atom.bound!r}"
    return None


def _value_problem(
    where: str, atom: OneOf | NoneOf, kind: type | None, known: Collection[str] = (), strict: bool = False
) -> str | None:
    """What is wrong with the values a condition lists.

    Args:
        kind: of every value; None, for "not given", is accepted beside words only.
        known: the words there are; none where any will do.
    """
    for value in atom.values:
        if kind in (int, bool) and type(value) is not kind:
            what = "a whole number" if kind is int else "True or False"
            return f"{where}: {atom.fact} is {what}, got {value!r}"
        if value is None:
            continue
        if (kind is str or known) and not isinstance(value, str):
            return f"{where}: {atom.fact} is a word, got {value!r}"
        problem = _word_problem(value, known, strict) if known and isinstance(value, str) else None
        if problem is not None:
            return f"{where}: {problem}"
    return None
