# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The shape of a policy file: which keys there are and what type each takes. Words are checked elsewhere.

The same model validates a file and exports the JSON Schema for editors.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from te_dispatch.core.errors import PolicyError
from te_dispatch.core.policy.known import did_you_mean
from te_dispatch.core.policy.parse import Document, KeyPath, shown_key

FormatVersion = Literal[1]
Portability = Literal["native", "common"]
OnMismatch = Literal["warn", "raise"]
Off = Literal["off"]
WhenScalar = str | int | float | bool | None
WhenValue = WhenScalar | list[WhenScalar]

_SELECTORS = "native, a backend, an implementation id (backend.name) or trait:name"
Selectors = Annotated[list[str], Meta(description=f"Each entry is {_SELECTORS}.")]
SomeSelectors = Annotated[list[str], Meta(min_length=1, description=f"Each entry is {_SELECTORS}.")]


class NumericsModel(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Numerical promises."""

    fp8_portability: (
        Annotated[
            Portability, Meta(description="native: each device's full FP8 range; common: equal codes on every vendor.")
        ]
        | UnsetType
    ) = UNSET
    deterministic: Annotated[bool, Meta(description="Only implementations that claim it.")] | UnsetType = UNSET


class RuleModel(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What holds for some operators, under some conditions."""

    op: Annotated[str, Meta(description="An operator or a family, globs allowed; name@version pins the version.")]
    when: (
        Annotated[
            dict[str, WhenValue],
            Meta(description="Fact: value, list of values, '>= N', '> N', '<= N', '< N' or '% N == 0'. All must hold."),
        ]
        | UnsetType
    ) = UNSET
    prefer: Selectors | UnsetType = UNSET
    allow: Selectors | UnsetType = UNSET
    deny: Selectors | UnsetType = UNSET
    require: SomeSelectors | UnsetType = UNSET


class ShadowModel(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Comparing a sample of calls with another backend."""

    against: Annotated[str, Meta(description="The backend that is taken to be right.")]
    fraction: (
        Annotated[float, Meta(gt=0, le=1, description="Of the calls that are compared; 0.001 by default.")] | UnsetType
    ) = UNSET
    on_mismatch: Annotated[OnMismatch, Meta(description="warn by default.")] | UnsetType = UNSET
    ops: (
        Annotated[list[str], Meta(min_length=1, description="Operators or families, globs allowed; all by default.")]
        | UnsetType
    ) = UNSET
    directory: (
        Annotated[str, Meta(min_length=1, description="Where the inputs of calls that differ are written.")] | UnsetType
    ) = UNSET
    limit: Annotated[int, Meta(ge=0, description="So many such files at most; 16 by default.")] | UnsetType = UNSET


class PolicyModel(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A te_dispatch policy."""

    version: Annotated[FormatVersion, Meta(description="Of this format.")]
    description: Annotated[str, Meta(description="One line for listings.")] | UnsetType = UNSET
    include: (
        Annotated[
            list[str],
            Meta(description="Shipped names or files, beside this one; weaker than this file, stronger first."),
        ]
        | UnsetType
    ) = UNSET
    prefer: Selectors | UnsetType = UNSET
    allow: Selectors | UnsetType = UNSET
    deny: Selectors | UnsetType = UNSET
    require: SomeSelectors | UnsetType = UNSET
    optional_backends: (
        Annotated[list[str], Meta(description="Backends that may be absent from a node.")] | UnsetType
    ) = UNSET
    numerics: NumericsModel | UnsetType = UNSET
    shadow: ShadowModel | Off | UnsetType = UNSET
    rules: Annotated[list[RuleModel], Meta(description="The first match decides on prefer.")] | UnsetType = UNSET


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a policy file. Words such as operators are not in it: they depend on the
    installed plugins."""
    schema = msgspec.json.schema(PolicyModel)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "te_dispatch policy", **schema}


def read_model(document: Document) -> PolicyModel:
    """The document as a model.

    Raises:
        PolicyError: an unknown key, a missing one, or a value of the wrong type, at its line and column.
    """
    if not isinstance(document.data, dict):
        # Not what it holds: this may be any file that somebody named by mistake, and messages end up in logs.
        kind = "a word" if isinstance(document.data, str) else _kind(document.data)
        raise document.error((), f"a policy is a mapping, got {kind}")
    try:
        return msgspec.convert(document.data, PolicyModel, strict=True)
    except msgspec.ValidationError as error:
        raise _positioned(document, str(error)) from None


# msgspec speaks of JSON; policies are YAML.
_WORDS = {
    "array": "a list",
    "object": "a mapping",
    "str": "a word",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
}


_ENUMS: dict[str, Any] = {
    "version": FormatVersion,
    "fp8_portability": Portability,
    "on_mismatch": OnMismatch,
    "shadow": Off,
}
_COMPARED = {">=": "of at least", "<=": "of at most", ">": "above"}


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return f"the {'word' if isinstance(value, str) else 'number'} {value!r}"


def _positioned(document: Document, message: str) -> PolicyError:
    text, _, at = message.partition(" - at `")
    path = _path(document, at.rstrip("`"))
    value = _at(document.data, path)
    name = next((str(part) for part in reversed(path) if isinstance(part, str)), "")
    if match := re.match(r"Object contains unknown field `(.*)`", text):
        key, valid = match.group(1), _fields(path)
        shown = shown_key(key).removeprefix("the ").removeprefix("a ")
        return document.error((*path, key), f"unknown {shown}{did_you_mean(key, valid)}", key=True)
    if match := re.match(r"Object missing required field `(.*)`", text):
        return document.error(path, f"the key {match.group(1)!r} is missing")
    if text.startswith("Invalid enum value"):
        options = get_args(_ENUMS[name])
        expected = " or ".join(str(option) for option in options)
        hint = did_you_mean(value, [str(o) for o in options], listing=False) if isinstance(value, str) else ""
        return document.error(path, f"{name}: expected {expected}, got {value!r}{hint}")
    if "of length >=" in text:
        wanted = "a word, got an empty one" if isinstance(value, str) else "at least one entry, got an empty list"
        return document.error(path, f"{name}: expected {wanted}")
    if match := re.match(r"Expected `\w+` (>=|<=|>) ([\d.]+)", text):
        limit = match.group(2).removesuffix(".0")
        return document.error(path, f"{name}: expected a number {_COMPARED[match.group(1)]} {limit}, got {value}")
    if match := re.match(r"Expected `([^`]*)`", text):
        kinds = list(dict.fromkeys(_WORDS.get(kind, kind) for kind in match.group(1).split(" | ")))
        return document.error(path, f"{name}: expected {' or '.join(kinds)}, got {_kind(value)}")
    return document.error(path, f"{name}: {text}")


def _path(document: Document, text: str) -> KeyPath:
    """msgspec's ``$.rules[0].when[...]`` as keys. It does not say which key of a dict; that is found again."""
    path: list[str | int] = []
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", text):
        if name:
            path.append(name)
        elif index == "...":
            path.append(_offender(_at(document.data, tuple(path))))
        else:
            path.append(int(index))
    return tuple(path)


def _offender(when: dict[str, Any]) -> str:
    for key, value in when.items():
        try:
            msgspec.convert(value, WhenValue, strict=True)
        except msgspec.ValidationError:
            return key
    raise AssertionError("every value converts by itself")


def _at(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = data[part]
    return data


def _fields(path: KeyPath) -> tuple[str, ...]:
    models: dict[str, type[Struct]] = {"rules": RuleModel, "numerics": NumericsModel, "shadow": ShadowModel}
    model = models[str(path[0])] if path else PolicyModel
    return model.__struct_fields__
