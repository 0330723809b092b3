# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch run``: a program, in a process where ``import transformer_engine`` imports this project."""

from __future__ import annotations

import functools
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from te_dispatch.cli.console import CommandError, answering
from te_dispatch.compat.alias import IMPORT_PATH, as_transformer_engine


def run(program: str, arguments: list[str], as_module: bool) -> None:
    """Run a program as ``python program arguments`` would, or ``python -m program arguments``.

    What it raises is its own: only mistakes of this command's caller end in one message.
    """
    with answering(False):
        start = _prepare(program, as_module)
    sys.argv = [program, *arguments]
    start()


def _prepare(program: str, as_module: bool) -> Callable[[], Any]:
    if as_module:
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(program) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise CommandError(f"no module {program!r}")
        start = functools.partial(runpy.run_module, program, run_name="__main__", alter_sys=True)
    else:
        script = Path(program)
        if not script.is_file():
            raise CommandError(f"no file {program!r}; a module is run by te-dispatch run -m {program}")
        sys.path.insert(0, str(script.parent.resolve()))
        start = functools.partial(runpy.run_path, program, run_name="__main__")
    try:
        as_transformer_engine()
    except RuntimeError as error:
        raise CommandError(str(error)) from None
    # Programs that it starts in turn, such as the workers of torchrun.
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [inherited]), str(IMPORT_PATH)])
    return start
