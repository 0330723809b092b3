# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""YAML as plain data in which every value still knows its line and column.

Only what JSON can say is accepted: no tags, no anchors, no second document, string keys. Scalars read as YAML 1.2's
core schema has them, so that ``no`` and ``off`` are words rather than False, as editors and the JSON Schema see it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from te_dispatch.core.errors import PolicyError
from te_dispatch.core.policy.model import Origin

#: Keys and indices from the top: ``("rules", 0, "prefer", 1)``.
KeyPath = tuple[str | int, ...]

_PLAIN = "tag:yaml.org,2002:"
_TRUE = frozenset(("true", "True", "TRUE"))
# Aliases of aliases grow exponentially and nesting recurses; no policy needs either.
_DEEPEST = 20
#: In bytes: PyYAML takes seconds for more, and no policy has a tenth of it.
_LARGEST = 1 << 20
#: In characters, of what a message says of a value.
_LONGEST = 400


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without YAML 1.1's surprises, and without aliases."""

    # Not inherited: those are YAML 1.1's.
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "aliases are not accepted; repeat the value or include a file", event.start_mark
            )
        return super().compose_node(parent, index)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(_PLAIN + _tag, re.compile(rf"^(?:{_pattern})$"), list(_first))


@dataclass
class Document:
    """One YAML file.

    Attributes:
        file: as messages name it.
        data: dicts, lists, strings, numbers, booleans and None.
        values: where each value starts, (line, column) from 1.
        keys: where each mapping's key starts.
        texts: scalars as they are written, for those whose number would lose something (version 9.10).
    """

    file: str
    data: Any = None
    values: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    keys: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    texts: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath = (), *, key: bool = False) -> Origin:
        """Where the value at `path` starts, or with `key` its key."""
        line, column = (self.keys if key else self.values)[path]
        return Origin(self.file, line, column)

    def error(self, path: KeyPath, message: str, *, key: bool = False) -> PolicyError:
        return _error(self.origin(path, key=key), message)


def shown_key(key: str) -> str:
    """A key in a message, unless it is more than a name: then it may be a line of a file that is no policy."""
    return f"the key {key!r}" if len(key) <= 60 and ":" not in key else "a key"


def _error(where: Origin, message: str) -> PolicyError:
    return PolicyError(f"{where}: {message if len(message) <= _LONGEST else message[:_LONGEST] + '...'}")


def read_file(path: Path) -> bytes:
    """What a policy file holds.

    Raises:
        PolicyError: it cannot be opened, or is larger than any policy.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST + 1)
    except OSError as error:
        raise PolicyError(f"{path}: cannot read the policy file: {error.strerror or error}") from None
    if len(raw) > _LARGEST:
        raise PolicyError(f"{path}: more than {_LARGEST >> 20} MiB, so it is no policy")
    return raw


def read_document(raw: bytes, file: str) -> Document:
    """Read a file's content.

    Args:
        raw: the content.
        file: the file's name in messages.

    Raises:
        PolicyError: it is not UTF-8, is not YAML, is empty, or says more than JSON could.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        start = raw.rfind(b"\n", 0, error.start) + 1
        line = raw.count(b"\n", 0, error.start) + 1
        column = len(raw[start : error.start].decode("utf-8", "replace")) + 1
        found = f"0x{raw[error.start]:02x}"
        raise PolicyError(f"{file}:{line}:{column}: byte {found} is not UTF-8; save the file as UTF-8") from None
    return parse_document(text, file)


def parse_document(text: str, file: str) -> Document:
    """As `read_document`, from text."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.line + 1}:{mark.column + 1}" if mark else "1:1"
        message = " ".join(part for part in (error.problem, error.context) if part)
        raise PolicyError(f"{file}:{where}: not readable as YAML: {message}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise PolicyError(f"{file}:{line}:{column}: the character U+{code:04X} is not allowed in YAML") from None
    except RecursionError:
        raise PolicyError(f"{file}:1:1: nested too deeply for a policy") from None
    if node is None:
        raise PolicyError(f"{file}:1:1: the policy is empty; it needs at least 'version: 1'")
    document = Document(file)
    document.data = _plain(node, (), document)
    return document


def _place(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _plain(node: yaml.Node, path: KeyPath, document: Document) -> Any:
    document.values[path] = _place(node)
    if len(path) > _DEEPEST:
        raise document.error(path, "nested too deeply for a policy")
    if isinstance(node, yaml.MappingNode):
        _no_tag(node, "map", path, document)
        return _mapping(node, path, document)
    if isinstance(node, yaml.SequenceNode):
        _no_tag(node, "seq", path, document)
        return [_plain(child, (*path, index), document) for index, child in enumerate(node.value)]
    document.texts[path] = node.value
    return _scalar(node, path, document)


def _mapping(node: yaml.MappingNode, path: KeyPath, document: Document) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line, column = _place(key_node)
        where = Origin(document.file, line, column)
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _PLAIN + "str":
            shown = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else f"a {key_node.id}"
            raise _error(where, f"a key must be a word, got {shown}")
        key = key_node.value
        at = (*path, key)
        if key in found:
            first = document.keys[at]
            raise PolicyError(f"{where}: {shown_key(key)} is given twice; the first is on line {first[0]}")
        document.keys[at] = (line, column)
        found[key] = _plain(value_node, at, document)
    return found


def _scalar(node: yaml.Node, path: KeyPath, document: Document) -> str | int | float | bool | None:
    text: str = node.value
    kind = node.tag.removeprefix(_PLAIN)
    try:
        if kind == "str":
            return text
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except ValueError:
        raise document.error(path, f"cannot read {text!r} as {kind}") from None
    if kind == "bool":
        return text in _TRUE
    if kind == "null":
        return None
    raise _tag_error(node, path, document)


def _no_tag(node: yaml.Node, kind: str, path: KeyPath, document: Document) -> None:
    if node.tag != _PLAIN + kind:
        raise _tag_error(node, path, document)


def _tag_error(node: yaml.Node, path: KeyPath, document: Document) -> PolicyError:
    tag = node.tag.replace(_PLAIN, "!!")
    return document.error(path, f"the tag {tag} would construct an object; a policy holds plain values only")
