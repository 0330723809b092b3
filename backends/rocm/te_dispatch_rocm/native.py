# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The compiled module, or why there is none."""

from __future__ import annotations

import importlib
from typing import Any

from te_dispatch_rocm import libraries


def load() -> Any:
    """`te_dispatch_rocm._native`; imports everywhere, GPU or not.

    Raises:
        ImportError: it was not built for this Python, or does not load; the message says what to do.
    """
    try:
        return importlib.import_module("te_dispatch_rocm._native")
    except ImportError as error:
        raise ImportError(
            f"te_dispatch_rocm's compiled module does not load ({error}); reinstall te-dispatch-rocm for this Python"
        ) from error


def load_with_libraries() -> Any:
    """The compiled module with HIP's runtime and hipBLASLt open.

    Raises:
        ImportError: the module or a library is not there; the message says which.
    """
    module = load()
    hip, hipblaslt = libraries.hip(), libraries.hipblaslt()
    if isinstance(hip, str):
        raise ImportError(hip)
    if isinstance(hipblaslt, str):
        raise ImportError(hipblaslt)
    try:
        module.open_hip(hip.path)
        module.open_hipblaslt(hipblaslt.path)
    except RuntimeError as error:
        raise ImportError(str(error)) from error
    return module
