# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operators of this project inside an installed Transformer Engine 2.20.

``NVTE_PLUGIN=te_dispatch.compat.nvte_plugin`` has Transformer Engine import this package, once it has loaded its native
module, and call `load_plugins`, which puts a module in the place of the native one: the functions that `manifest` says
are served call operators, all else stays native.

=================  ================================================================================================
`manifest`         which of the native functions are served, by which operator, and which are passed on and why
`seam`             the module that takes the native one's place
`passing`          when an adapter leaves a call to the native function
the other modules  the adapters, by family: `activations`, `norms`, `softmaxes`, `rope`, `experts`, `multi_tensor`,
                   `scales`, `products`; `records` reads FP8 tensors
`proof`            whether the functions in use are these
=================  ================================================================================================

Start with `manifest`. This module and `manifest` may import the standard library alone, so that importing them does not
fail where te_dispatch is installed: see `NvtePluginError` for why that matters. The others may import torch,
`te_dispatch.ops` and what that may.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

from te_dispatch.compat.nvte_plugin.manifest import MANIFEST, MODULE, NATIVE, RELEASE

__all__ = ["NvtePluginError", "calls", "load_plugins", "verify"]


class NvtePluginError(BaseException):
    """The operators of this project could not take their place in Transformer Engine.

    Transformer Engine catches every `Exception` of a plugin, warns, and goes on with its own functions: a training run
    would then not be what it says it is. Frameworks, too, try to import Transformer Engine and go on without it.
    Therefore this is no `Exception`: it ends the import of Transformer Engine, with a traceback that shows the cause.
    """


def load_plugins() -> None:
    """Put the functions of this project in the place of Transformer Engine's. Transformer Engine calls this.

    Calling it again does nothing.

    Raises:
        NvtePluginError: they cannot take that place; the message says why, and its cause is shown. The native module is
            where it was.
    """
    try:
        _load()
    except Exception as error:
        raise NvtePluginError(
            f"NVTE_PLUGIN={__name__}: {error}. Transformer Engine would go on with its own functions, so its import "
            "ends here; unset NVTE_PLUGIN to have it run them"
        ) from error


def _load() -> None:
    native = sys.modules.get(NATIVE)
    if native is None:
        raise RuntimeError(
            f"there is no {NATIVE}: only an installed Transformer Engine {RELEASE} with its native module loads this. "
            "Where there is none, te_dispatch.as_transformer_engine() has programs import te_dispatch instead"
        )
    version = importlib.metadata.version("transformer_engine")
    if version.split(".")[:2] != RELEASE.split("."):
        raise RuntimeError(f"Transformer Engine is {version}, and these functions are those of {RELEASE}")
    missing = [name for name in MANIFEST if not callable(getattr(native, name, None))]
    if missing:
        raise RuntimeError(f"the native module of Transformer Engine {version} lacks {', '.join(missing)}")

    from te_dispatch.compat.nvte_plugin.proof import bypassing
    from te_dispatch.compat.nvte_plugin.seam import Replacement, seam_of
    from te_dispatch.core.discovery import list_entry_points

    there = seam_of(sys.modules.get(MODULE))
    if there is not None and there.native is native:
        return
    if not list_entry_points()[0]:
        raise RuntimeError("no backend is installed: pip install te-dispatch-triton, or another")
    replacement = Replacement(native)
    late = bypassing(replacement.__te_dispatch__)
    if late:
        raise RuntimeError(f"Transformer Engine is already imported: {late[0]}")
    sys.modules[MODULE] = replacement


def verify() -> dict[str, Any]:
    """What `load_plugins` did in this process, proven by looking at Transformer Engine's modules.

    Call it once Transformer Engine is imported, at the start of a training script for instance: it also finds a plugin
    that was never loaded, because NVTE_PLUGIN was set too late or misspelt, or because te_dispatch is not installed
    where Transformer Engine runs.

    Returns:
        ``functions``: the name of each served function -> the modules of Transformer Engine that hold it by that name,
        beside those that hold the whole module, which are listed as ``modules``.

    Raises:
        RuntimeError: functions of Transformer Engine's own are in use in place of these; the message names them.
    """
    from te_dispatch.compat.nvte_plugin.proof import prove

    return prove()


def calls() -> dict[str, dict[str, Any]]:
    """Function -> its calls in this process: ``{"served": 12, "passed_on": {"a MXFP8Quantizer": 3}}``.

    Raises:
        RuntimeError: the plugin is not loaded in this process.
    """
    from te_dispatch.compat.nvte_plugin.proof import loaded

    return loaded().calls()
