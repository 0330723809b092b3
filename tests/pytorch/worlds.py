# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Steps of a module, made in many ways, with everything that they give."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.core import scopes
from te_dispatch.pytorch.attention.signature import AttentionSignatures
from te_dispatch.pytorch.capture.signatures import CapturedCalls

from .capturing import RECIPES
from .changes import gemm_modules

#: In the order in which things are compared; None where there is nothing.
Results = list[Any]

CALIBRATING = "calibrating"
_RECIPES = {**RECIPES, "other margin": DelayedScaling(amax_history_len=3, margin=1)}


@dataclasses.dataclass(frozen=True)
class World:
    """How a step is made.

    Attributes:
        recipe: of the autocast, by its name in `RECIPES`; ``none`` for no autocast.
        shape: of the input, without its features.
        x: how the input lies in memory: ``dense``, ``transposed`` or ``expanded`` (stride 0).
        trains_x: whether the input takes a gradient.
        gradient: of the output: ``dense``, ``transposed``, ``expanded`` (stride 0), or ``apart``: the gradients of the
            input and of each parameter, one after the other, of one graph.
        run: what the forward runs in.
        first: is_first_microbatch, of modules that take it.
        arguments: others of the forward.
    """

    recipe: str = "delayed"
    shape: tuple[int, ...] = (32, 1)
    x: str = "dense"
    trains_x: bool = True
    gradient: str = "dense"
    run: str = "plain"
    first: bool | None = None
    arguments: tuple[tuple[str, Any], ...] = ()


#: What `World` may become.
WORLDS: dict[str, list[Any]] = {
    "recipe": [*_RECIPES, CALIBRATING],
    "shape": [(32, 1), (64, 1), (32,), (16, 2), (96, 1)],
    "x": ["dense", "transposed", "expanded"],
    "trains_x": [True, False],
    "gradient": ["dense", "transposed", "expanded", "apart"],
    "run": [
        "plain", "no_grad", "inference", "torch.autocast", "backward in torch.autocast", "checkpoint",
        "reentrant checkpoint", "recomputed in autocast", "saved tensors hooks", "observed", "thread", "policy",
        "nested autocasts", "quantized gradient",
    ],
    "first": [None, True, False],
}  # fmt: skip


@contextmanager
def without_capture() -> Iterator[None]:
    """A block in which no call is captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedCalls, "capture", lambda *args: None)
        patch.setattr(AttentionSignatures, "find", lambda *args: None)
        patch.setattr(AttentionSignatures, "made", lambda self, operands, arguments, call: call)
        yield


def step(module: torch.nn.Module, world: World, seed: int) -> Results:
    """The outputs, the gradients and the states of a step; of one that raises, the error's class and message."""
    try:
        if world.run == "thread":
            found: Results = []
            thread = threading.Thread(target=lambda: found.append(_outcome(module, world, seed)))
            thread.start()
            thread.join()
            return [*found[0], *states(module)]
        return [*_outcome(module, world, seed), *states(module)]
    finally:
        module.zero_grad()


def _outcome(module: torch.nn.Module, world: World, seed: int) -> Results:
    try:
        return _step(module, world, seed)
    except Exception as error:
        return [type(error).__name__, str(error)]


def _step(module: torch.nn.Module, world: World, seed: int) -> Results:
    generator = torch.Generator().manual_seed(seed)
    x = _input(world, next(iter(module.parameters())).dtype, generator)
    before, surroundings = _surroundings(world, module)
    with surroundings:
        out = _forward(module, world, x)
    outputs = [part for part in (out if isinstance(out, tuple) else (out,)) if part is not None]
    found: Results = [*before, *outputs]
    differentiable = [part for part in outputs if part.requires_grad]
    if not differentiable:
        return found
    if world.gradient == "apart":
        wanted = [t for t in (x, *module.parameters()) if t.requires_grad]
        total = sum((part.float() ** 2).sum() for part in differentiable)
        for each in wanted:
            found += torch.autograd.grad(total, (each,), retain_graph=True, allow_unused=True)
        found += torch.autograd.grad(total, wanted, allow_unused=True)
        return found
    grads = [_gradient(part, world.gradient, generator) for part in differentiable]
    with _backward_surroundings(world):
        torch.autograd.backward(differentiable, grads)
    return [*found, x.grad, *(parameter.grad for parameter in module.parameters())]


def _input(world: World, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    shape = (*world.shape, 64)
    if world.x == "expanded":
        made = torch.randn(1, *shape[1:], generator=generator).expand(shape)
    elif world.x == "transposed":
        made = torch.randn(*reversed(shape), generator=generator).permute(*reversed(range(len(shape))))
    else:
        made = torch.randn(shape, generator=generator)
    return made.to(dtype).requires_grad_(world.trains_x)


def _gradient(part: torch.Tensor, how: str, generator: torch.Generator) -> torch.Tensor:
    if how == "expanded":
        return torch.ones((), dtype=part.dtype).expand(part.shape)
    if how == "transposed":
        turned = torch.randn(*reversed(part.shape), generator=generator)
        return turned.to(part.dtype).permute(*reversed(range(part.dim())))
    return torch.randn(part.shape, generator=generator).to(part.dtype)


def _region(world: World) -> AbstractContextManager[Any]:
    if world.recipe == "none":
        return nullcontext()
    if world.recipe == CALIBRATING:
        return te.autocast(enabled=False, calibrating=True, recipe=_RECIPES["delayed"])
    return te.autocast(recipe=_RECIPES[world.recipe])


def _surroundings(world: World, module: torch.nn.Module) -> tuple[Results, AbstractContextManager[Any]]:
    """(what is compared beside, what the forward runs in)."""
    calls: Results = []
    if world.run == "no_grad":
        return [], torch.no_grad()
    if world.run == "inference":
        return [], torch.inference_mode()
    if world.run == "torch.autocast":
        return [], torch.autocast("cpu", dtype=torch.bfloat16)
    if world.run == "saved tensors hooks":
        return [], torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t)
    if world.run == "observed":
        return calls, scopes.observe(lambda operator, *others: calls.append(operator.name))
    if world.run == "policy":
        return [], te_dispatch.policy({"version": 1, "numerics": {"deterministic": True}})
    return [], nullcontext()


def _backward_surroundings(world: World) -> AbstractContextManager[Any]:
    if world.run == "backward in torch.autocast":
        return torch.autocast("cpu", dtype=torch.bfloat16)
    return _region(world) if world.run == "recomputed in autocast" else nullcontext()


def _forward(module: torch.nn.Module, world: World, x: torch.Tensor) -> Any:
    arguments = dict(world.arguments)
    if world.first is not None:
        arguments["is_first_microbatch"] = world.first

    def call(x: torch.Tensor) -> Any:
        return module(x, **arguments)

    def computed(x: torch.Tensor) -> Any:
        """Without parameters among the results: PyTorch's reentrant checkpoint recomputes such a call without end."""
        out = call(x)
        return tuple(one for one in out if not _is_parameter(one)) if isinstance(out, tuple) else out

    with _region(world):
        if world.run == "checkpoint":
            return checkpoint(call, x, use_reentrant=False)
        if world.run in ("reentrant checkpoint", "recomputed in autocast"):
            return checkpoint(computed, x, use_reentrant=True)
        if world.run == "nested autocasts":
            first = call(x)
            with te.autocast(enabled=False):
                second = call(x)
            with te.autocast(recipe=_RECIPES["block"]):
                third = call(x)
            parts = [out if isinstance(out, tuple) else (out,) for out in (first, second, third)]
            return tuple(one for out in parts for one in out)
        if world.run == "quantized gradient":
            out = call(x)
            if isinstance(out, tuple) or world.recipe in ("none", CALIBRATING):
                return out
            torch.manual_seed(1)
            return te.Linear(out.shape[-1], 32, device="cpu", params_dtype=out.dtype)(out, fp8_grad=True)
        return call(x)


def _is_parameter(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter)


def states(module: torch.nn.Module) -> Results:
    """The delayed scaling of a module's parts."""
    return [
        tensor.clone()
        for part in gemm_modules(module)
        for scales in part.fp8_state.scales.live().values()
        for tensor in (scales.history, scales.scale, scales.scale_amax)
    ]


def same(found: Results, expected: Results) -> bool:
    """Whether the results of two steps are equal, bit for bit; NaN is equal to itself."""
    return len(found) == len(expected) and all(_equal(a, b) for a, b in zip(found, expected))


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    if isinstance(a, te.QuantizedTensor) or isinstance(b, te.QuantizedTensor):
        return type(a) is type(b) and _equal(a.dequantize(), b.dequantize())
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.detach().contiguous().view(torch.uint8), b.detach().contiguous().view(torch.uint8))
