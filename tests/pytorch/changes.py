# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a module may become between its steps."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

import te_dispatch.pytorch as te
from te_dispatch.pytorch.modules.gemm_module import GemmModule

#: What a module may become: name -> a function of the module, which may return another one to go on with.
CHANGES: dict[str, Callable[[Any], Any]] = {}


def change(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    CHANGES[function.__name__.replace("_", " ")] = function
    return function


def _parameters(module: Any) -> list[tuple[Any, str]]:
    """(owner, name) of each parameter."""
    return [(part, name) for part in module.modules() for name, _ in part.named_parameters(recurse=False)]


@change
def weights_in_place(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)


@change
def another_parameter(module: Any) -> None:
    owner, name = _parameters(module)[0]
    setattr(owner, name, torch.nn.Parameter(getattr(owner, name).detach() * 3.0))


@change
def another_storage(module: Any) -> None:
    for owner, name in _parameters(module):
        parameter = getattr(owner, name)
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()


@change
def first_parameter_frozen(module: Any) -> None:
    next(iter(module.parameters())).requires_grad_(False)


@change
def last_parameter_frozen(module: Any) -> None:
    list(module.parameters())[-1].requires_grad_(False)


@change
def every_other_parameter_frozen(module: Any) -> None:
    for parameter in list(module.parameters())[1::2]:
        parameter.requires_grad_(False)


@change
def a_bias_removed(module: Any) -> None:
    for owner, name in _parameters(module):
        if name.endswith("bias") and isinstance(owner, GemmModule):
            setattr(owner, name, None)
            return


@change
def all_parameters_trained(module: Any) -> None:
    module.requires_grad_(True)


@change
def other_dtype_and_back(module: Any) -> None:
    module.bfloat16().float()


@change
def other_dtype(module: Any) -> None:
    module.bfloat16()


@change
def state_loaded(module: Any) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()))


@change
def copied(module: Any) -> Any:
    return copy.deepcopy(module)


@change
def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@change
def hooked(module: Any) -> None:
    module.register_forward_hook(_doubled)


def _doubled(module: Any, args: Any, out: Any) -> Any:
    return tuple(None if part is None else part * 2 for part in out) if isinstance(out, tuple) else out * 2


@change
def part_hooked(module: Any) -> None:
    _first_part(module).register_forward_hook(_doubled)


@change
def part_hooked_in_its_backward(module: Any) -> None:
    _first_part(module).register_full_backward_hook(lambda part, dx, dy: tuple(x if x is None else x * 2 for x in dx))


@change
def part_replaced(module: Any) -> None:
    for name, part in list(module.named_children()):
        setattr(module, name, copy.deepcopy(part))
        _scale(getattr(module, name), 1.25)


@change
def part_replaced_in_its_dictionary(module: Any) -> None:
    for name, part in list(module._modules.items()):
        module._modules[name] = copy.deepcopy(part)
        _scale(module._modules[name], 0.75)


@change
def part_evaluating(module: Any) -> None:
    _first_part(module).eval()


@change
def part_with_another_forward(module: Any) -> None:
    part = _first_part(module)
    plain = type(part).forward
    part.forward = lambda *args, **others: _doubled(part, args, plain(part, *args, **others))


@change
def part_of_another_class(module: Any) -> None:
    part = _first_part(module)
    part.__class__ = _doubling(type(part))


@functools.cache
def _doubling(kind: type[Any]) -> type[Any]:
    class Doubling(kind):  # type: ignore[misc]
        def forward(self, *args: Any, **others: Any) -> Any:
            return _doubled(self, args, super().forward(*args, **others))

    return Doubling


@change
def parameter_hooked(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(torch.neg)


@change
def evaluating(module: Any) -> None:
    module.eval()


@change
def training(module: Any) -> None:
    module.train()


@change
def state_begun_anew(module: Any) -> None:
    for part in gemm_modules(module):
        part.reset_fp8_meta_tensors()


@change
def plan_forgotten(module: Any) -> None:
    for part in gemm_modules(module):
        part.fp8_initialized = False


@change
def another_activation(module: Any) -> None:
    for part in _parts(module, "activation"):
        part.activation = "relu" if part.activation == "gelu" else "gelu"


@change
def another_epsilon(module: Any) -> None:
    for part in _norms(module):
        part.eps = 0.5 if part.eps < 0.1 else 1e-5


@change
def another_center_of_its_norm(module: Any) -> None:
    for part in _norms(module):
        part.zero_centered_gamma = not part.zero_centered_gamma


@change
def recomputing_itself(module: Any) -> None:
    for part in _parts(module, "checkpoint"):
        part.checkpoint = not part.checkpoint


@change
def returning_its_norm(module: Any) -> None:
    if isinstance(module, (te.LayerNormLinear, te.LayerNormMLP)):
        module.return_layernorm_output = not module.return_layernorm_output


@change
def returning_its_bias(module: Any) -> None:
    if isinstance(module, GemmModule):
        module.return_bias = not module.return_bias


@change
def passing_its_input(module: Any) -> None:
    if isinstance(module, (te.LayerNormLinear, te.LayerNormMLP)):
        module.passes_input = not module.passes_input


def _first_part(module: Any) -> Any:
    """The innermost module that is called first; the module itself where it has none."""
    children = list(module.children())
    return _first_part(children[0]) if children else module


def _scale(module: Any, factor: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)


def gemm_modules(module: Any) -> Iterator[GemmModule]:
    return (part for part in module.modules() if isinstance(part, GemmModule))


def _norms(module: Any) -> Iterator[Any]:
    kinds = te.LayerNorm, te.RMSNorm, te.LayerNormLinear, te.LayerNormMLP
    return (part for part in module.modules() if isinstance(part, kinds))


def _parts(module: Any, attribute: str) -> Iterator[Any]:
    return (part for part in module.modules() if isinstance(part, te.LayerNormMLP) and hasattr(part, attribute))
