# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations on their way into and out of products whose weights several ranks divide, and their gradients.

A weight that is divided by outputs (``column``) takes the whole input on every rank and gives a part of the features;
one that is divided by inputs (``row``) takes a part of the features and gives a summand of the output (Shoeybi et al.
2019, "Megatron-LM"). Without sequence parallelism, the row's summands are added up on all ranks, and so are, in the
backward, the column's summands of the input's gradient. With it, ranks divide the tokens, the first dimension, outside
of the pair of products: they are gathered before the column's product, and the row's summands are added up and dealt
out again (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").

The functions are steps of the modules' autograd Functions: a recorded call repeats them.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.core import scopes
from te_dispatch.pytorch.distributed import collectives
from te_dispatch.pytorch.distributed.arguments import Division
from te_dispatch.pytorch.step import step


@step
def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    if not scopes.capture().makes_calls:  # a plan communicates nothing
        return x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    return collectives.gather_along_first_dim(x, group)[0]


@step
def _dealt(x: torch.Tensor, group: Any) -> torch.Tensor:
    if not scopes.capture().makes_calls:
        return x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    return collectives.reduce_scatter_along_first_dim(x, group)[0]


@step
def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """In place: x is what a product has just made, which nobody else has."""
    return collectives.allreduce(x, group)[0] if scopes.capture().makes_calls else x


def entering(x: torch.Tensor, division: Division | None) -> torch.Tensor:
    """What the first product multiplies: x, or where ranks divide the tokens, those of all."""
    return x if division is None or not (division.column and division.sequence) else _gathered(x, division.group)


def entering_gradient(dx: torch.Tensor, division: Division | None) -> torch.Tensor:
    """The gradient of `entering`'s x, of the first product's."""
    if division is None or not division.column:
        return dx
    return (_dealt if division.sequence else _summed)(dx, division.group)


def leaving(y: torch.Tensor, division: Division | None) -> torch.Tensor:
    """What leaves the module, of the last product's result: y, or the sum over ranks, where they divide the tokens a
    part of it."""
    if division is None or not division.row:
        return y
    return (_dealt if division.sequence else _summed)(y, division.group)


def leaving_gradient(dy: torch.Tensor, division: Division | None) -> torch.Tensor:
    """The gradient of the last product's result, of that of `leaving`'s."""
    return dy if division is None or not (division.row and division.sequence) else _gathered(dy, division.group)


def part_of(owner: str, name: str, size: int, ranks: int) -> int:
    """A rank's part of a size that several ranks divide.

    Raises:
        ValueError: it is not divisible.
    """
    if size % ranks:
        raise ValueError(f"{owner}: {name} must be divisible by the {ranks} ranks of tp_group, got {size}")
    return size // ranks


def require_divisible_call(module: Any, inp: Any, fp8_output: bool = False, fp8_grad: bool = False) -> None:
    """Raise for calls that several ranks do not make together.

    Args:
        module: a `ParallelModule` of several ranks. inp, fp8_output, fp8_grad: of its call.

    Raises:
        RuntimeError: the module has no group. NotImplementedError: an option that only one rank serves.
        ValueError: an input without a dimension of tokens.
    """
    owner = type(module).__name__
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{owner}: a tp_group of {module.tp_size} ranks is not supported in a compiled region; compile around the "
            "module (torch.compiler.disable)"
        )
    if module.tp_group is None:
        raise RuntimeError(
            f"{owner}: made with tp_size={module.tp_size} and without a group; call set_tensor_parallel_group first"
        )
    if fp8_output or fp8_grad:
        raise NotImplementedError(
            f"{owner}: fp8_output and fp8_grad are not supported with a tp_group of {module.tp_size} ranks, whose "
            "results are added up"
        )
    if isinstance(inp, torch.Tensor) and inp.dim() < 2:
        raise ValueError(
            f"{owner}: inp must be (tokens, ..., features) with a tp_group of {module.tp_size} ranks, got shape "
            f"{tuple(inp.shape)}"
        )
