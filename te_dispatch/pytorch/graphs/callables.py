# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What can be captured: modules and functions whose work is all on the device, and all of whose gradients are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from te_dispatch.ops.checks.guards import PLAIN
from te_dispatch.pytorch.graphs.settings import NAME
from te_dispatch.pytorch.graphs.signature import hooks_of
from te_dispatch.pytorch.modules.weight_grads import WeightGradModule

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def name_of(function: Callable[..., Any]) -> str:
    """A callable in messages."""
    if isinstance(function, torch.nn.Module):
        return type(function).__name__
    return getattr(function, "__name__", type(function).__name__)


def check_callable(function: Callable[..., Any], caches: bool) -> None:
    """Make sure that a callable can be captured, as far as can be told before it runs.

    Args:
        caches: whether its weights are to be quantized in first microbatches only.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: what is in the way, and what to do.
    """
    if not callable(function):
        raise TypeError(f"{NAME}: modules must be a module, a function or a tuple of these, got {function!r:.80}")
    if isinstance(function, torch.nn.Module):
        _check_module(function)
    elif caches:
        raise NotImplementedError(
            f"{NAME}: cache_quantized_params=True is not supported for functions ({name_of(function)}), only for "
            "modules, whose weights can be found"
        )


def _check_module(whole: torch.nn.Module) -> None:
    name = name_of(whole)
    if getattr(whole.__dict__.get("forward"), "is_graphed", False):
        raise RuntimeError(f"{NAME}: {name} is graphed already; `del module.forward` brings its own forward back")
    for path, module in whole.named_modules():
        place = f"{name}.{path}" if path else name
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            raise RuntimeError(
                f"{NAME}: {place} has hooks, which replays of a graph would not run: remove them before; hooks of "
                f"{name} itself can be registered afterwards"
            )
        if isinstance(module, WeightGradModule) and (module.fuse_wgrad_accumulation or module.need_backward_dw()):
            argument = "fuse_wgrad_accumulation" if module.fuse_wgrad_accumulation else "delay_wgrad_compute"
            raise NotImplementedError(f"{NAME}: {place} has {argument}=True, which is not supported yet, only False")
    for path, buffer in whole.named_buffers():
        if buffer.requires_grad:
            raise ValueError(f"{NAME}: the buffer {path} of {name} requires a gradient; make it a parameter")
    for path, parameter in whole.named_parameters():
        if parameter.requires_grad and hooks_of(parameter):
            raise ValueError(
                f"{NAME}: {name}.{path} has gradient hooks, which a replay would run a second time: register them "
                "afterwards"
            )


def check_outputs(owner: str, outputs: Iterable[Any], known: Sequence[torch.Tensor]) -> None:
    """Make sure that a graph can return the outputs, and that their gradients go to known tensors only: others would
    get none.

    Raises:
        NotImplementedError: a tensor of a class of its own. ValueError: another leaf.
    """
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            raise NotImplementedError(
                f"{NAME}: {owner} returns a {type(tensor).__name__}, which is not supported yet, only torch.Tensor"
            )
    expected = {id(tensor) for tensor in known}
    queue = deque(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)
    seen = set(queue)
    while queue:
        node = queue.popleft()
        leaf: Any = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in expected:
            raise ValueError(
                f"{NAME}: {owner} reads a tensor of shape {tuple(leaf.shape)} that requires a gradient and is neither "
                "one of its arguments nor a parameter of the module: pass it as an argument, or a module that has it"
            )
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                queue.append(below)
