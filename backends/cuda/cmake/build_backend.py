# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""scikit-build-core's build backend, which asks for the compiler's packages where the machine has no CUDA toolkit."""

from __future__ import annotations

from typing import Any

import toolkit
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from scikit_build_core.build import get_requires_for_build_editable as _editable
from scikit_build_core.build import get_requires_for_build_wheel as _wheel

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _compiler() -> list[str]:
    return [] if toolkit.nvcc() else toolkit.requirements()


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_wheel(config_settings), *_compiler()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_editable(config_settings), *_compiler()]
