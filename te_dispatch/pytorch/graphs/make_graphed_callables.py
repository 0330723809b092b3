# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`make_graphed_callables`: modules as CUDA graphs, FP8 included. How: `te_dispatch.pytorch.graphs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_dispatch.common.recipe import Recipe
from te_dispatch.pytorch.graphs import graphs
from te_dispatch.pytorch.graphs.callables import check_callable, name_of
from te_dispatch.pytorch.graphs.graphed import graphed
from te_dispatch.pytorch.graphs.schedule import Schedule, one_after_the_other, pipeline
from te_dispatch.pytorch.graphs.session import Session
from te_dispatch.pytorch.graphs.settings import NAME, resolve_settings
from te_dispatch.pytorch.graphs.signature import Signature
from te_dispatch.torch_private import graph_task

__all__ = ["make_graphed_callables"]


def make_graphed_callables(
    modules: Any,
    sample_args: tuple[Any, ...] | list[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | tuple[bool, ...] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None,
    calibrating: bool | None = None,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: list[int] | None = None,
    _num_layers_per_chunk: list[int] | None = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Sequence[Any] | None = None,
) -> Any:
    """Capture modules or functions as CUDA graphs, forward and backward, and return what replays them.

    As `torch.cuda.make_graphed_callables`, with the autocast of this package. Each call is warmed up and captured
    inside ``autocast(enabled, calibrating, recipe, amax_reduction_group, _graph=True)``, in one pool of memory. States
    of delayed scaling and random states are afterwards as before. A replay copies its arguments into the samples, which
    become the memory that the graph reads; amaxes are recorded inside the graph, and scales are updated outside, where
    eager calls update them: call the result in an autocast with the same arguments. Dropout draws anew in each replay.

    Args:
        modules: a module, a function, or a tuple of these that run in this order. A function may read no tensor that
            requires a gradient and is not its argument. Modules keep their parameters' memory from now on.
        sample_args: positional arguments of a call, a tuple or a list, all of them CUDA tensors (or lists and dicts of
            such) that look like those of later calls, without an autograd graph; for a tuple of modules a tuple of such
            tuples.
        num_warmup_iters: forward and backward passes before the capture, at least 1.
        allow_unused_input: whether an argument or a parameter that requires a gradient may get none.
        sample_kwargs: keyword arguments, likewise: a dict, or a tuple of dicts.
        fp8_enabled, fp8_calibrating, fp8_recipe, fp8_group, fp8_weight_caching: deprecated names of the next five.
        enabled: whether modules quantize; a tuple says so for each of `modules`. False by default.
        calibrating, recipe, amax_reduction_group: as in `autocast`.
        cache_quantized_params: quantize weights only where a call says ``is_first_microbatch=True``; every call must
            then say True or False. The casts of the weights are a graph of their own, which runs before the forward's.
        _order: the order of a pipeline-parallel rank: c for the forward of chunk c's next microbatch, -c for its next
            backward; chunks are numbered from 1. `sample_args` and `sample_kwargs` then have an entry for each call, by
            chunk, in it by microbatch, in that by layer. Calls must run in this order.
        _num_layers_per_chunk: how many of `modules` each chunk has, None for equal numbers.
        pool: memory of `torch.cuda.graph_pool_handle` or of another graph; None for a pool of its own.
        retain_graph_in_backward: of the backward passes that are captured.
        _reuse_graph_input_output_buffers: not supported yet, only False.
        clone_param_grads_on_return: whether gradients of parameters are copied. Without, they lie in memory of the
            graph, and the next backward of the same call overwrites them. Gradients of arguments that are no leaves do.
        pre_warmup_hook, post_warmup_hook: functions that are called before and after the warm-up.
        capture_time_hooks: not supported yet, only None.

    Returns:
        For each of `modules` the module, with a forward that replays; for a function, another one; with `_order` one
        function for each call. One of these, or a tuple, as `modules` was. In the other training mode, where gradients
        are wanted that were not captured, and without gradients under delayed scaling, the forward itself is called.
        Outputs lie in memory of the graph until the next call. Each result has a method ``reset()``, which lets go of
        its graphs and of their memory; a call that would replay them raises from then on.

    Raises:
        NotImplementedError: an argument not supported yet; the message names it.
        TypeError, ValueError, RuntimeError: what cannot be captured, before anything is; a call of the result with
            other arguments or in another autocast than was captured, or whose backward comes after another call.
    """
    given = locals()
    single = not isinstance(modules, tuple)
    callables = (modules,) if single else modules
    settings = resolve_settings(given, len(callables))
    if isinstance(modules, list) or not callables:
        raise TypeError(f"{NAME}: modules must be a module, a function or a tuple of these, got {modules!r:.80}")
    for function in callables:
        check_callable(function, settings.caches)
    if len(set(map(id, callables))) < len(callables):
        raise ValueError(f"{NAME}: modules has one of them twice; several calls of a module need _order")
    schedule = _schedule(_order, _num_layers_per_chunk, len(callables))
    alone = single and _order is None
    signatures = _signatures(callables, schedule, sample_args, sample_kwargs, alone)
    device = _device(signatures, callables)
    _check_surroundings(device)
    seen: set[int] = set()
    for signature in signatures:
        signature.check_samples(device)
        signature.separate(seen)
    session = Session(callables, schedule, signatures, settings, graphs.CudaGraphs(device, settings.pool))
    results = []
    for call, captured in enumerate(session.run(device)):
        function = callables[schedule.owners[call]]
        replaying = graphed(function, captured, settings.caches)
        if isinstance(function, torch.nn.Module) and not schedule.pipelined:
            function.forward = replaying
            function.reset = replaying.reset
            replaying = function
        results.append(replaying)
    return results[0] if alone else tuple(results)


def _schedule(order: Any, layers_per_chunk: Any, callables: int) -> Schedule:
    if order is not None:
        return pipeline(order, layers_per_chunk, callables)
    if layers_per_chunk is not None:
        raise ValueError(f"{NAME}: _num_layers_per_chunk needs _order, got _order=None")
    return one_after_the_other(callables)


def _signatures(
    callables: Sequence[Callable[..., Any]], schedule: Schedule, sample_args: Any, sample_kwargs: Any, alone: bool
) -> list[Signature]:
    """What the calls take.

    Raises:
        TypeError, ValueError: samples of another number of calls, or of another form.
    """
    calls = len(schedule.owners)
    if alone:
        sample_args, sample_kwargs = (sample_args,), None if sample_kwargs is None else (sample_kwargs,)
    if sample_kwargs is None:
        sample_kwargs = ({},) * calls
    for name, samples, what, kinds in (
        ("sample_args", sample_args, "tuple", (tuple, list)),
        ("sample_kwargs", sample_kwargs, "dict", (Mapping,)),
    ):
        form = f"a {what} of tensors" + ("" if alone else " for each call")
        if not isinstance(samples, (tuple, list)) or not all(isinstance(sample, kinds) for sample in samples):
            raise TypeError(f"{NAME}: {name} must be {form}, got {samples!r:.80}")
        if len(samples) != calls:
            raise ValueError(f"{NAME}: {name} must have {calls} entries, one for each call, got {len(samples)}")
    signatures = []
    for owner, args, kwargs in zip(schedule.owners, sample_args, sample_kwargs):
        function = callables[owner]
        taken = function.forward if isinstance(function, torch.nn.Module) else function
        signatures.append(Signature(name_of(function), taken, args, kwargs))
    return signatures


def _device(signatures: Sequence[Signature], callables: Sequence[Callable[..., Any]]) -> torch.device:
    """Where the calls run.

    Raises:
        ValueError: tensors that no graph can read, or none at all.
    """
    found = [(f"a sample of {signature.owner}", sample) for signature in signatures for sample in signature.buffers] + [
        (f"a parameter of {name_of(function)}", parameter)
        for function in callables
        if isinstance(function, torch.nn.Module)
        for parameter in function.parameters()
    ]
    tensors = [(what, x) for what, x in found if isinstance(x, torch.Tensor)]
    kind = graphs.CudaGraphs.device_type
    for what, tensor in tensors:
        if tensor.device.type != kind:
            raise ValueError(f"{NAME}: {what} is on {tensor.device}, and graphs read memory of {kind} devices only")
    if not tensors:
        raise ValueError(f"{NAME}: neither a sample nor a parameter says on which device to capture: pass tensors")
    return tensors[0][1].device


def _check_surroundings(device: torch.device) -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{NAME} cannot run in inference mode, whose tensors cannot be written to: use torch.no_grad()"
        )
    if graph_task() != -1:
        raise RuntimeError(f"{NAME} cannot run inside a backward pass: call it before the training step")
    if torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            f"{NAME} needs torch.autocast(..., cache_enabled=False): what it caches would be memory of the graph"
        )
