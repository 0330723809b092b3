# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""How an exception out of a plugin's code is told: in one phrase with its place, and as a traceback on request."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

#: Set to 1, warnings about plugins carry the traceback, and so do unexpected errors of the command line.
TRACEBACK = "TE_DISPATCH_TRACEBACK"

_PACKAGE = str(Path(__file__).resolve().parents[1])
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def phrase(error: BaseException) -> str:
    """``KeyError: 'x'``."""
    return f"{type(error).__name__}: {error}"


def place(error: BaseException) -> str:
    """``, at /path/module.py:12`` of the innermost frame that is the plugin's; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _carries(frame.filename):
            return f", at {frame.filename}:{frame.lineno}"
    return ""


def _carries(filename: str) -> bool:
    """Whether a file's frames only carry a plugin's exception: this package, stevedore, the standard library."""
    if filename.startswith(("<", _PACKAGE)) or f"{os.sep}stevedore{os.sep}" in filename:
        return True
    return filename.startswith(_STANDARD) and not filename.startswith(_INSTALLED)


def traceback_text(error: BaseException) -> str:
    """The whole traceback, with causes."""
    return "".join(traceback.format_exception(error))


def on_request(text: str) -> str:
    """A traceback as the end of a warning, empty unless `TRACEBACK` is 1."""
    return f"\n{text}" if text and os.environ.get(TRACEBACK) == "1" else ""
