# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The compiled module, or why there is none."""

from __future__ import annotations

import importlib
from typing import Any


def load() -> Any:
    """`te_dispatch_cuda._native`; imports everywhere, GPU or not.

    Raises:
        ImportError: it was not built for this Python, or does not load; the message says what to do.
    """
    try:
        return importlib.import_module("te_dispatch_cuda._native")
    except ImportError as error:
        raise ImportError(
            f"te_dispatch_cuda's compiled module does not load ({error}); reinstall te-dispatch-cuda for this Python"
        ) from error
