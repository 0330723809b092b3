# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Links and paths in the documentation lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .workshop import REPOSITORY

_ROOT = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*_ROOT, *sorted((REPOSITORY / "docs").rglob("*.md"))]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def _prose(page: Path) -> str:
    return _CODE.sub("", page.read_text(encoding="utf-8"))


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _broken(page: Path) -> Iterator[str]:
    for link in _LINK.findall(_prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link:
            continue
        known = _HEADING.findall(_prose(target)) if anchor and target.is_file() else []
        if not target.exists() or (anchor and anchor not in map(_anchor, known)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(_broken(page)) == []


def test_the_index_lists_every_page() -> None:
    listed = set(_LINK.findall((REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")))
    assert [
        page.name for page in sorted((REPOSITORY / "docs").glob("*.md")) if page.name not in {*listed, "index.md"}
    ] == []


def test_what_contributing_says_to_change_exists() -> None:
    table = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Where to add what", 1)[1]
    paths = re.findall(r"`([\w.]+/[\w./]*)`", table.split("\n## ", 1)[0])
    assert len(paths) > 20
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
