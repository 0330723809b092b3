# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Files that are replaced as a whole: what interrupts or fails leaves the one that was there."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from te_dispatch.core import files

#: What happens before a file is replaced, each of which may be where an interruption or a full disk comes.
STEPS = [(Path, "write_text"), (Path, "chmod"), (os, "replace")]


@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[name for _, name in STEPS])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=repr)
def test_what_goes_wrong_leaves_the_earlier_file(
    owner: Any, name: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text("earlier\n")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(type(error)) as caught:
            files.replace(path, "later\n" * 1000)
    assert path.read_text() == "earlier\n" and os.listdir(tmp_path) == ["report.json"]
    if isinstance(error, OSError):
        assert re.search(r"No space left on device; .*report\.json was not written", str(caught.value))


def test_a_write_that_stops_half_way_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("earlier\n")
    with pytest.raises(UnicodeEncodeError):
        files.replace(path, "x" * 100_000 + "\ud800")
    assert path.read_text() == "earlier\n" and os.listdir(tmp_path) == ["journal.jsonl"]
