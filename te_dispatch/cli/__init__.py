# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The ``te-dispatch`` command. Without the libraries that it needs it says what to install.

Start with `app`, which lists the verbs; each verb's work is in the module of its name, imported when the verb runs. May
import: typer, rich, and every other room. No room imports this one.
"""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Entry point of the ``te-dispatch`` script."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"te-dispatch needs {' and '.join(missing)}: pip install {' '.join(missing)}\n")
        raise SystemExit(2)
    from te_dispatch.cli.app import app

    app()
