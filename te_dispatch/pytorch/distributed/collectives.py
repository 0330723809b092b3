# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Collectives over a group of ranks, as tensor and sequence parallelism use them, and weights divided among ranks.

No function here has a gradient. On a group of one rank none communicates. Each collective must be called by all ranks
of the group, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from te_dispatch.pytorch.arguments import reject_unsupported
from te_dispatch.pytorch.distributed.arguments import forked, require_one_rank
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor, plain

__all__ = [
    "allreduce",
    "gather_along_first_dim",
    "gather_split_1d_tensor",
    "get_distributed_rank",
    "get_distributed_world_size",
    "initialize_affine_weight_gpu",
    "prepare_te_modules_for_fsdp",
    "reduce_scatter_along_first_dim",
    "set_tensor_model_parallel_attributes",
    "split_tensor_into_1d_equal_chunks",
]

_MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")

Group: TypeAlias = "dist.ProcessGroup | None"


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_distributed_world_size(group: Group = None) -> int:
    """The number of ranks of a group, None for the default group; 1 where torch.distributed is not initialized."""
    return dist.get_world_size(group) if _initialized() else 1


def get_distributed_rank(group: Group = None) -> int:
    """This process's rank in a group, None for the default group.

    Raises:
        RuntimeError: torch.distributed is not initialized.
    """
    if not _initialized():
        raise RuntimeError(
            "get_distributed_rank: torch.distributed is not initialized; call torch.distributed.init_process_group"
        )
    return dist.get_rank(group)


def allreduce(inp: torch.Tensor, tp_group: Group = None, async_op: bool = False) -> tuple[torch.Tensor, Any]:
    """Sum a tensor over the ranks of a group, in place.

    Returns:
        The tensor, and with `async_op` the handle to wait for before it is used, else None.
    """
    if get_distributed_world_size(tp_group) == 1:
        return inp, None
    return inp, dist.all_reduce(inp, group=tp_group, async_op=async_op)


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: Group, async_op: bool = False, output: torch.Tensor | None = None
) -> tuple[torch.Tensor, Any]:
    """The sum of a tensor over the ranks of a group, of which each rank gets its part of the first dimension.

    Args:
        inp: (n, ...) with n divisible by the number of ranks.
        tp_group: the group. async_op: whether to return at once.
        output: where to write, contiguous (n / ranks, ...); None for a new tensor. On one rank nothing is written.

    Returns:
        The sum's part (n / ranks, ...), on one rank `inp` itself; with `async_op` and several ranks the handle to wait
        for before it is used, else None.

    Raises:
        ValueError: n is not divisible, or `output` is of another shape or dtype.
    """
    ranks = get_distributed_world_size(tp_group)
    if ranks == 1:
        return inp, None
    if inp.shape[0] % ranks:
        raise ValueError(
            f"reduce_scatter_along_first_dim: the first dimension must be divisible by the {ranks} ranks of tp_group, "
            f"got shape {tuple(inp.shape)}"
        )
    shape = (inp.shape[0] // ranks, *inp.shape[1:])
    out = _written("reduce_scatter_along_first_dim: output", output, shape, inp)
    return out, dist.reduce_scatter_tensor(out, inp.contiguous(), group=tp_group, async_op=async_op)


def gather_along_first_dim(
    inp: torch.Tensor,
    process_group: Group,
    async_op: bool = False,
    quantizer: None = None,
    output_tensor: torch.Tensor | None = None,
    external_coalescing: bool = False,
) -> tuple[torch.Tensor, Any]:
    """The tensors of all ranks of a group, one after the other along the first dimension.

    Args:
        inp: (n, ...), of the same shape on every rank. The values of a `QuantizedTensor` are gathered.
        process_group: the group. async_op: whether to return at once.
        quantizer: gathering in few bits is not supported yet.
        output_tensor: where to write, contiguous (ranks * n, ...); None for a new tensor. On one rank nothing is
            written.
        external_coalescing: whether the caller has opened a coalescing manager. None is opened here, so that it has no
            effect.

    Returns:
        The gathered tensor (ranks * n, ...), on one rank `inp` itself; with `async_op` and several ranks the handle to
        wait for before it is used, else None.

    Raises:
        ValueError: `output_tensor` is of another shape or dtype. NotImplementedError: a quantizer.
    """
    reject_unsupported("gather_along_first_dim", {"quantizer": quantizer}, {"quantizer": None})
    ranks = get_distributed_world_size(process_group)
    if ranks == 1:
        return inp, None
    values = plain(inp).contiguous()
    shape = (ranks * values.shape[0], *values.shape[1:])
    out = _written("gather_along_first_dim: output_tensor", output_tensor, shape, values)
    return out, dist.all_gather_into_tensor(out, values, group=process_group, async_op=async_op)


def split_tensor_into_1d_equal_chunks(tensor: torch.Tensor, tp_group: Group, new_buffer: bool = False) -> torch.Tensor:
    """This rank's part of a tensor's elements.

    Args:
        tensor: contiguous, of a number of elements that is divisible by the number of ranks.
        new_buffer: whether to copy; else the result is a view.

    Returns:
        (elements / ranks,)

    Raises:
        ValueError: the elements are not divisible, or the tensor is not contiguous.
    """
    ranks = get_distributed_world_size(tp_group)
    if tensor.numel() % ranks or not tensor.is_contiguous():
        raise ValueError(
            f"split_tensor_into_1d_equal_chunks: tensor must be contiguous, with elements for each of the {ranks} "
            f"ranks of tp_group, got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    part = tensor.view(-1).chunk(ranks)[get_distributed_rank(tp_group) if ranks > 1 else 0]
    return part.detach().clone() if new_buffer else part


def gather_split_1d_tensor(tensor: torch.Tensor, tp_group: Group) -> torch.Tensor:
    """The inverse of `split_tensor_into_1d_equal_chunks`: the parts of all ranks as one vector, a new tensor."""
    if get_distributed_world_size(tp_group) == 1:
        return tensor.detach().clone()
    return gather_along_first_dim(tensor.detach(), tp_group)[0]


def set_tensor_model_parallel_attributes(tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark a weight as one that ranks divide, in the names that Megatron reads.

    Args:
        tensor: gets the attributes tensor_model_parallel, partition_dim and partition_stride.
        is_parallel, dim, stride: their values.

    Raises:
        RuntimeError: the tensor has one of them already.
    """
    for name in _MARKS:
        if hasattr(tensor, name):
            raise RuntimeError(f"set_tensor_model_parallel_attributes: the tensor has the attribute {name} already")
    for name, value in zip(_MARKS, (is_parallel, dim, stride)):
        setattr(tensor, name, value)


def initialize_affine_weight_gpu(
    weight: torch.Tensor,
    init_method: Callable[[torch.Tensor], Any],
    get_rng_state_tracker: Callable[[], Any] | None,
    partition_dim: int = 0,
    stride: int = 1,
    set_tp_attributes: bool = True,
) -> None:
    """Initialize a weight, on whichever device it is, and mark it as divided.

    Args:
        weight: the part of this rank.
        init_method: fills it.
        get_rng_state_tracker: gives the tracker from whose default state it draws; None for the generator's own.
        partition_dim, stride: `set_tensor_model_parallel_attributes`, unless `set_tp_attributes` is False.

    Raises:
        RuntimeError: the weight is marked already; it is not changed then.
    """
    if set_tp_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    with forked(get_rng_state_tracker):
        init_method(weight)


def _written(what: str, out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Where a collective writes: `out` after a check, or a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if tuple(out.shape) != shape or out.dtype != like.dtype or not out.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous {like.dtype} of shape {shape}, got {out.dtype} of shape {tuple(out.shape)}, "
            f"strides {out.stride()}"
        )
    return out


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Have modules under FSDP divide what they save for the backward among the ranks, which saves memory.

    On one rank there is nothing to divide. On several, FSDP works without this call: each rank keeps what it saves.

    Args:
        fsdp_root: a model that `torch.distributed.fsdp.FullyShardedDataParallel` has wrapped.

    Raises:
        TypeError: another model. RuntimeError: a wrapped module has quantized parameters.
        NotImplementedError: FSDP divides a module among several ranks.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    name = "prepare_te_modules_for_fsdp"
    if not isinstance(fsdp_root, FullyShardedDataParallel):
        raise TypeError(
            f"{name}: fsdp_root must be wrapped by FullyShardedDataParallel, got {type(fsdp_root).__name__}"
        )
    for wrapped in FullyShardedDataParallel.fsdp_modules(fsdp_root):
        inner = wrapped.module
        if any(isinstance(parameter, QuantizedTensor) for parameter in inner.parameters()):
            raise RuntimeError(f"{name}: {type(inner).__name__} has quantized parameters, which FSDP cannot divide")
        try:
            require_one_rank(name, "the process group", wrapped.process_group)
        except NotImplementedError as error:
            raise NotImplementedError(f"{error}; leave the call out: FSDP divides parameters without it") from None
