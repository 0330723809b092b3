# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""For programs that capture CUDA graphs of modules by themselves, under Transformer Engine's names.

`make_graphed_callables` needs none of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from te_dispatch.common.recipe import DelayedScaling, Recipe
from te_dispatch.pytorch.fp8.autocast import thread
from te_dispatch.pytorch.modules.gemm_module import GemmModule

__all__ = [
    "graph_pool_handle",
    "is_graph_capturing",
    "restore_fp8_tensors",
    "save_fp8_tensors",
    "set_capture_end",
    "set_capture_start",
]

graph_pool_handle = torch.cuda.graph_pool_handle

#: Whether a program has said that it captures.
_declared = False


def set_capture_start() -> None:
    """Say that graphs are captured from now on, for `is_graph_capturing`. Modules need not know."""
    global _declared
    _declared = True


def set_capture_end() -> None:
    """Say that no graphs are captured any more."""
    global _declared
    _declared = False


def is_graph_capturing() -> bool:
    """Whether `set_capture_start` has said so, or this thread is inside of `make_graphed_callables`."""
    return _declared or thread.recording is not None


def save_fp8_tensors(modules: Iterable[torch.nn.Module], recipe: Recipe | None) -> list[Any] | None:
    """Copies of the state of delayed scaling of modules and all modules in them, for `restore_fp8_tensors`.

    Args:
        recipe: of the autocast that they run under.

    Returns:
        What ``get_fp8_meta_tensors()`` gives, None for modules that have no such state; None in the list's place where
        the recipe is not `DelayedScaling`.
    """
    if not isinstance(recipe, DelayedScaling):
        return None
    return [_of(part) for module in modules for part in module.modules()]


def _of(part: torch.nn.Module) -> Any:
    return part.get_fp8_meta_tensors() if isinstance(part, GemmModule) else None


def restore_fp8_tensors(modules: Iterable[torch.nn.Module], fp8_tensors: list[Any] | None) -> None:
    """Write what `save_fp8_tensors` gave for the same modules back; states that did not exist begin anew.

    Args:
        fp8_tensors: None for nothing.

    Raises:
        RuntimeError: of another number of modules; nothing is written.
    """
    if fp8_tensors is None:
        return
    parts = [part for module in modules for part in module.modules()]
    if len(parts) != len(fp8_tensors):
        raise RuntimeError(
            f"restore_fp8_tensors: fp8_tensors must be of these {len(parts)} modules, as save_fp8_tensors gave them, "
            f"got {len(fp8_tensors)}"
        )
    for part, tensors in zip(parts, fp8_tensors):
        if isinstance(part, GemmModule):
            part.reset_fp8_meta_tensors(tensors)
