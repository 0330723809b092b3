# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Reading policy files.

A file is read in four steps, each with line and column in its errors: text to plain data (`parse`), keys and
types (`schema`), words (`known`, `when`), contradictions (`check`).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from te_dispatch.core.errors import PolicyError
from te_dispatch.core.policy.check import check_contradictions
from te_dispatch.core.policy.known import FIRST_PARTY_BACKENDS, Known, did_you_mean
from te_dispatch.core.policy.model import Numerics, Origin, Policy, Rule, Selector, Shadow, merge
from te_dispatch.core.policy.parse import Document, KeyPath, read_document, read_file
from te_dispatch.core.policy.schema import PolicyModel, RuleModel, json_schema, read_model
from te_dispatch.core.policy.when import check_archs, fact_name, read_condition
from te_dispatch.core.shipped import shipped_policies

if TYPE_CHECKING:
    from te_dispatch.core.requirements import Condition

__all__ = ["Known", "effective_with_origins", "json_schema", "load_policy"]


@dataclasses.dataclass(frozen=True)
class LoadedPolicy:
    """A policy, and what the files held that it was read from.

    Attributes:
        policy: the layer.
        files: content by path.
    """

    policy: Policy
    files: Mapping[Path, bytes]

    def current(self) -> bool:
        """Whether the files still hold that."""
        try:
            return all(read_file(path) == raw for path, raw in self.files.items())
        except PolicyError:
            return False


def load_policy(path_or_name: str | os.PathLike[str], known: Known) -> Policy:
    """`load_files`, the policy alone."""
    return load_files(path_or_name, known).policy


def load_files(path_or_name: str | os.PathLike[str], known: Known) -> LoadedPolicy:
    """Read a policy and the files it includes into one layer.

    Args:
        path_or_name: the name of a shipped policy, or a file. What has a folder or a suffix is a file.
        known: words of this machine.

    Returns:
        The layer, with the files' content. Numerical promises that no file makes stay None; every entry
        knows its file, line and column.

    Raises:
        PolicyError: ``file:line:column: message``, with the nearest valid word where a word is unknown.
    """
    path, problem = _locate(os.fspath(path_or_name), Path())
    if path is None:
        raise PolicyError(problem)
    loader = _Loader(known)
    return LoadedPolicy(loader.load(path, ()), loader.files)


def effective_with_origins(policy: Policy) -> list[tuple[str, Any, Origin]]:
    """Each value of a policy under its path (``rules[0].prefer[1]``), with where it came from."""
    found: list[tuple[str, Any, Origin]] = []

    def entries(path: str, selectors: Sequence[Selector] | None, whole: Origin) -> None:
        if selectors is None:
            return
        if not selectors and path.endswith("allow"):
            found.append((path, [], whole))
        found.extend((f"{path}[{i}]", s.text, s.origin) for i, s in enumerate(selectors))

    entries("prefer", policy.prefer, policy.origin)
    entries("allow", policy.allow, policy.origin)
    entries("deny", policy.deny, policy.origin)
    for index, group in enumerate(policy.require):
        entries(f"require[{index}]", group, policy.origin)
    found.extend((f"optional_backends[{i}]", b, policy.origin) for i, b in enumerate(policy.optional_backends))
    for name in ("fp8_portability", "deterministic"):
        value = getattr(policy.numerics, name)
        if value is not None:
            found.append((f"numerics.{name}", value, policy.numerics.origins.get(name, Origin())))
    found.extend(_shadow_with_origins(policy.shadow))
    for index, rule in enumerate(policy.rules):
        path = f"rules[{index}]"
        found.append((f"{path}.op", rule.op, rule.origin))
        found.extend((f"{path}.when[{i}]", c.describe(), rule.origin) for i, c in enumerate(rule.when))
        entries(f"{path}.prefer", rule.prefer, rule.origin)
        entries(f"{path}.allow", rule.allow, rule.origin)
        entries(f"{path}.deny", rule.deny, rule.origin)
        entries(f"{path}.require", rule.require, rule.origin)
    return found


def _shadow_with_origins(shadow: Shadow | None) -> list[tuple[str, Any, Origin]]:
    """Values that no file gives stand under the section's own place."""
    if shadow is None:
        return []
    data = shadow.as_data()
    if isinstance(data, str):
        return [("shadow", data, shadow.origin)]
    shown = {name: value for name, value in data.items() if value not in (None, [])}
    return [(f"shadow.{name}", value, shadow.origins.get(name, shadow.origin)) for name, value in shown.items()]


def _locate(text: str, beside: Path) -> tuple[Path | None, str]:
    """(the file, "") or (None, what is wrong). Files are looked for relative to `beside`."""
    shipped = shipped_policies()
    names_a_file = any(separator in text for separator in (os.sep, os.altsep or os.sep, "."))
    if not names_a_file and text in shipped:
        return shipped[text], ""
    try:
        path = beside / Path(text).expanduser()
        if path.is_file():
            return path, ""
    except (OSError, RuntimeError, ValueError) as error:  # a folder, a name or a home that the system refuses
        return None, f"{text}: cannot read the policy file: {getattr(error, 'strerror', None) or error}"
    if names_a_file:
        return None, f"{path}: no such policy file"
    return None, f"{text!r} is neither a shipped policy nor a file{did_you_mean(text, shipped)}"


#: How long a chain of files that include each other may be.
_DEEPEST = 16


class _Loader:
    """One `load_policy`: files already read, so that a file included twice counts once."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.loaded: dict[Path, Policy] = {}
        self.files: dict[Path, bytes] = {}

    def load(self, path: Path, including: tuple[Path, ...]) -> Policy:
        """`including` are the files that led here, outermost first; the caller has refused cycles."""
        self.files[path] = read_file(path)
        document = read_document(self.files[path], str(path))
        model = read_model(document)
        chain = (*including, path)
        included, optional = self._included(document, model, chain)
        own = _FileReader(document, model, self.known, optional).policy()
        check_contradictions(own, self.known)
        return _flatten(own, included) if included else own

    def _included(
        self, document: Document, model: PolicyModel, chain: tuple[Path, ...]
    ) -> tuple[list[Policy], set[str]]:
        """(the included layers that no other file brought, optional backends of all included files)."""
        found: list[Policy] = []
        optional: set[str] = set()
        for index, text in enumerate(model.include or ()):
            at: KeyPath = ("include", index)
            path, problem = _locate(text, chain[-1].parent)
            if path is None:
                raise document.error(at, f"include: {problem}")
            resolved = path.resolve()
            if resolved in [p.resolve() for p in chain]:
                shown = " -> ".join(str(p) for p in (*chain, path))
                raise document.error(at, f"include cycle: {shown}")
            if resolved not in self.loaded:
                if len(chain) >= _DEEPEST:
                    raise document.error(at, f"include: more than {_DEEPEST} files include each other in turn")
                try:
                    self.loaded[resolved] = self.load(path, chain)
                except PolicyError as error:
                    raise PolicyError(f"{error}\n  included at {document.origin(at)}") from None
                found.append(self.loaded[resolved])
            optional.update(self.loaded[resolved].optional_backends)
        return found, optional


def _flatten(own: Policy, included: Sequence[Policy]) -> Policy:
    """A file and what it includes as one layer, which unlike the effective policy may leave promises open."""
    layers = [own, *included]
    promises: dict[str, Any] = {}
    for name in ("fp8_portability", "deterministic"):
        promises[name] = next((v for x in layers if (v := getattr(x.numerics, name)) is not None), None)
    merged = merge(layers)
    numerics = Numerics(**promises, origins=merged.numerics.origins)
    return dataclasses.replace(merged, name=own.name, description=own.description, numerics=numerics, origin=own.origin)


class _FileReader:
    """Turns one file's model into a `Policy`, checking its words."""

    def __init__(self, document: Document, model: PolicyModel, known: Known, optional: Collection[str]) -> None:
        self.document = document
        self.model = model
        self.known = known
        self.optional = {*optional, *(model.optional_backends or ())}

    def policy(self) -> Policy:
        model, path = self.model, Path(self.document.file)
        for index, name in enumerate(model.optional_backends or ()):
            self._check_backend_name(name, ("optional_backends", index))
        require = self._selectors(("require",), model.require)
        return Policy(
            name=path.stem if shipped_policies().get(path.stem) == path else path.name,
            description=model.description or "",
            prefer=self._selectors(("prefer",), model.prefer) or (),
            allow=self._selectors(("allow",), model.allow),
            deny=self._selectors(("deny",), model.deny) or (),
            require=(require,) if require else (),
            rules=tuple(self._rule(index, rule) for index, rule in enumerate(model.rules or ())),
            numerics=self._numerics(),
            optional_backends=tuple(model.optional_backends or ()),
            shadow=self._shadow(),
            origin=self.document.origin(),
        )

    def _shadow(self) -> Shadow | None:
        model = self.model.shadow
        if model is UNSET:
            return None
        at: KeyPath = ("shadow",)
        if isinstance(model, str):
            return Shadow("", origin=self.document.origin(at))
        problem = self.known.backend_problem(model.against, self.optional)
        if problem:
            raise self.document.error((*at, "against"), f"against: {problem}")
        for index, op in enumerate(model.ops or ()):
            if problem := self.known.operator_problem(op):
                raise self.document.error((*at, "ops", index), f"ops: {problem}")
        given = {name: value for name in model.__struct_fields__ if (value := getattr(model, name)) is not UNSET}
        origins = {name: self.document.origin((*at, name)) for name in given}
        given["ops"] = tuple(op.partition("@")[0] for op in given.get("ops", ()))
        return Shadow(**given, origin=self.document.origin(at), origins=origins)

    def _numerics(self) -> Numerics:
        model = self.model.numerics
        if model is UNSET:
            return Numerics()
        given = {
            name: value for name in ("fp8_portability", "deterministic") if (value := getattr(model, name)) is not UNSET
        }
        return Numerics(**given, origins={name: self.document.origin(("numerics", name)) for name in given})

    def _check_backend_name(self, name: str, at: KeyPath) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
            raise self.document.error(at, f"optional_backends: {name!r} is no backend's name (lower case, no dot)")
        if name in FIRST_PARTY_BACKENDS:
            raise self.document.error(at, f"optional_backends: {name!r} is first-party and may always be absent")

    def _selectors(
        self, at: KeyPath, texts: Any, operators: Collection[str] | None = None
    ) -> tuple[Selector, ...] | None:
        if texts is UNSET:
            return None
        found: list[Selector] = []
        for index, text in enumerate(texts):
            problem = self.known.selector_problem(text, self.optional, operators)
            if not problem and any(text == earlier.text for earlier in found):
                problem = f"{text!r} is listed twice"
            if problem:
                raise self.document.error((*at, index), f"{at[-1]}: {problem}")
            found.append(Selector(text, self.document.origin((*at, index))))
        return tuple(found)

    def _rule(self, index: int, model: RuleModel) -> Rule:
        at: KeyPath = ("rules", index)
        problem = self.known.operator_problem(model.op)
        if problem:
            raise self.document.error((*at, "op"), f"op: {problem}")
        pattern = model.op.partition("@")[0]
        matched = self.known.matched(pattern)
        spoken_of = self.known.with_companions(matched)
        rule = Rule(
            op=pattern,
            when=self._when(at, model, matched),
            prefer=self._selectors((*at, "prefer"), model.prefer, spoken_of) or (),
            allow=self._selectors((*at, "allow"), model.allow, spoken_of),
            deny=self._selectors((*at, "deny"), model.deny, spoken_of) or (),
            require=self._selectors((*at, "require"), model.require, spoken_of) or (),
            origin=self.document.origin(at),
        )
        if not (rule.prefer or rule.deny or rule.require) and rule.allow is None:
            raise self.document.error(at, "the rule says nothing; give it prefer, allow, deny or require")
        return rule

    def _when(self, rule: KeyPath, model: RuleModel, operators: Collection[str]) -> tuple[Condition, ...]:
        found: dict[str, tuple[Condition, ...]] = {}
        for name, value in (model.when or {}).items():
            at = (*rule, "when", name)
            try:
                fact = fact_name(name, operators, self.known)
            except ValueError as error:
                raise self.document.error(at, f"when: {error}", key=True) from None
            if fact in found:
                raise self.document.error(at, f"when: {name!r} is the fact {fact!r}, given twice", key=True)
            texts = [self.document.texts[p] for p in self._scalars(at, value)]
            try:
                found[fact] = read_condition(fact, value, texts, operators, self.known, self.optional)
            except ValueError as error:
                raise self.document.error(at, f"when: {error}") from None
        conditions = tuple(itertools.chain(*found.values()))
        try:
            check_archs(conditions, self.known)
        except ValueError as error:
            name = "arch" if "arch" in (model.when or {}) else "device.arch"
            raise self.document.error((*rule, "when", name), f"when: {error}") from None
        return conditions

    @staticmethod
    def _scalars(at: KeyPath, value: Any) -> list[KeyPath]:
        return [(*at, index) for index in range(len(value))] if isinstance(value, list) else [at]
