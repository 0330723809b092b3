# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What every verb shares: where output goes, and how errors end.

With ``--json`` standard output holds one JSON document and nothing else. Messages and progress go to standard error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

import typer
from rich.console import Console

from te_dispatch.core.errors import DispatchError
from te_dispatch.core.failures import TRACEBACK

#: What ends a verb with something broken or different, as opposed to a mistake in its arguments.
FOUND = 1
MISTAKE = 2
INTERRUPTED = 130


class CommandError(Exception):
    """A mistake of the caller's, told in one message."""


def out() -> Console:
    """Standard output for people. Piped output is as wide as it needs to be, so that no cell is cut."""
    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=160)


def err() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False)


#: Where `emit` writes while standard output is kept for the document; None for standard output itself.
_document: ContextVar[TextIO | None] = ContextVar("te_dispatch.cli.document", default=None)


def emit(data: Any) -> None:
    """One JSON document on standard output. NaN and infinities, which JSON lacks, must not reach it."""
    (_document.get() or sys.stdout).write(json.dumps(data, indent=2, allow_nan=False) + "\n")


@contextmanager
def _only_the_document(as_json: bool) -> Iterator[None]:
    """Keep standard output for `emit`: what plugins and libraries print goes to standard error."""
    if not as_json:
        yield
        return
    with contextlib.ExitStack() as undo:
        stream = sys.stdout
        undo.callback(setattr, sys, "stdout", stream)
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):  # a test's stream, which native code cannot write to
            document: TextIO = stream
        else:
            stream.flush()
            document = undo.enter_context(os.fdopen(os.dup(descriptor), "w", encoding=stream.encoding))
            undo.callback(os.dup2, document.fileno(), descriptor)
            undo.callback(stream.flush)
            os.dup2(sys.stderr.fileno(), descriptor)
        sys.stdout = sys.stderr
        token = _document.set(document)
        undo.callback(_document.reset, token)
        yield


def require(extra: str, *modules: str) -> None:
    """Check that optional libraries are installed.

    Raises:
        CommandError: names the extra to install.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"this needs {' and '.join(missing)}: pip install 'te-dispatch[{extra}]'")


@contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """Turn errors into one message and an exit code; with ``--json`` into a document as well."""
    try:
        yield
    except (CommandError, DispatchError, OSError) as error:
        _fail(str(error), as_json, error)
    except KeyboardInterrupt as error:
        _fail("interrupted", as_json, error, INTERRUPTED)
    except typer.Exit:
        raise
    except Exception as error:
        message = f"unexpected {type(error).__name__}: {error} (set {TRACEBACK}=1 to see where; please report it)"
        _fail(message, as_json, error)


def _fail(message: str, as_json: bool, error: BaseException, code: int = MISTAKE) -> None:
    if os.environ.get(TRACEBACK) == "1":
        raise error
    if as_json:
        emit({"error": message})
    sys.stderr.write(f"te-dispatch: {message}\n")
    raise typer.Exit(code) from None


def verb(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a typer command that takes ``as_json`` so that it never ends in a traceback."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        as_json = bool(kwargs.get("as_json"))
        with _only_the_document(as_json), answering(as_json):
            code = function(*args, **kwargs)
        if code:
            raise typer.Exit(code)

    return run


def resolving(function: Callable[..., Any]) -> Callable[..., Any]:
    """`verb` of a command that runs installed backends' manifests and probes, which another process survives first.

    Raises:
        FatalPlugin: when called, where one of them ends that process.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from te_dispatch.core.trial import refuse_fatal

        device = kwargs.get("device")
        refuse_fatal(device if isinstance(device, str) else None)  # of tune it is an index
        return function(*args, **kwargs)

    return verb(run)
