# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Refuses to build, and so to install from a checkout, in an environment that has Transformer Engine itself.

A wheel runs nothing when it is installed: one that was built elsewhere can be installed beside Transformer Engine, and
Python then imports Transformer Engine's package.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import site
import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def installed() -> str | None:
    """Where Transformer Engine itself is installed; None where it is not."""
    # pip builds in an environment of its own, whose sys.path lacks the folders that it installs into.
    folders = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
    package = importlib.machinery.PathFinder.find_spec("transformer_engine", folders)
    if package is not None and package.submodule_search_locations:  # this project's is a module
        return next(iter(package.submodule_search_locations))
    for distribution in importlib.metadata.distributions(name="transformer-engine", path=folders):
        if distribution.read_text("RECORD") is not None:  # the metadata of this project's has none
            return str(distribution.locate_file(""))
    return None


class Refuse(BuildHookInterface[Any]):
    """The build hook that hatchling calls."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raise where Transformer Engine is installed.

        Raises:
            RuntimeError: says where, and what to do.
        """
        found = installed()
        if found is not None:
            raise RuntimeError(
                f"Transformer Engine is installed at {found}: te-dispatch-transformer-engine provides the same import "
                "name and does not install beside it. Uninstall transformer-engine first, or leave both as they are: "
                "docs/nvte_plugin.md runs te_dispatch's operators inside Transformer Engine"
            )
