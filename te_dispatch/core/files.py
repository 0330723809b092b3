# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Writing a file whole or not at all: a full disk or an interruption leaves the one that was there before."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_serial = itertools.count()


def replace(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8 and put it in the place of the one of that name.

    A link is followed: the file that it leads to is replaced. A file that is there keeps its mode; a new one has what
    the process's umask leaves.

    Raises:
        OSError: it cannot be written, or what is there is no regular file; the message names it.
    """
    target = Path(os.path.realpath(path))
    fresh = target.with_name(f".{target.name}.{os.getpid()}.{next(_serial)}.part")
    try:
        mode = _mode(target)
        fresh.write_text(text, encoding="utf-8")
        if mode is not None:
            fresh.chmod(mode)
        os.replace(fresh, target)
    except OSError as error:
        raise type(error)(error.errno, f"{error.strerror}; {path} was not written", os.fspath(path)) from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()


def _mode(target: Path) -> int | None:
    """Of the file that is there, None without one."""
    try:
        found = target.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):
        raise FileExistsError(17, "no regular file")
    return stat.S_IMODE(found)


@contextlib.contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other processes that ask for the same out of a block, e.g. reading a file, adding to it, replacing it.

    The lock is a file of its own beside `path`, because the file itself is replaced. Where the system has no such
    locks (Windows) nothing is kept out.

    Raises:
        OSError: it cannot be made.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    target = Path(os.path.realpath(path))
    # Who may write the folder may take the lock, whoever made it.
    handle = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
