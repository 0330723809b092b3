# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Writing a file whole or not at all: a full disk or an interruption leaves the one that was there before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def replace(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8 and put it in the place of the one of that name.

    Raises:
        OSError: it cannot be written; the message names the file.
    """
    target = Path(path)
    fresh = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, target)
    except OSError as error:
        raise type(error)(error.errno, f"{error.strerror}; {target} was not written", str(target)) from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
