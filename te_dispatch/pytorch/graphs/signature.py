# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The tensors that a captured call takes: they must look the same in every call, because a graph reads fixed memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from te_dispatch.ops.checks.guards import PLAIN
from te_dispatch.pytorch.graphs.settings import NAME

_MICROBATCH = "is_first_microbatch"


class Signature:
    """How a call's arguments look.

    Attributes:
        owner: what is called, for messages.
        buffers: the tensors that the graphs read. They are the samples themselves, or copies of those that another
            call reads, too.
        names: of the buffers, as arguments.
        keywords: names of keyword arguments, in the order in which the buffers have them.
        defaults: what other keyword arguments must be: what the callable takes them to be when they are left out.
        takes_microbatch: whether the callable has an argument ``is_first_microbatch``.
    """

    __slots__ = ("owner", "buffers", "names", "keywords", "defaults", "takes_microbatch", "_positional", "_spec")

    def __init__(
        self, owner: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.owner = owner
        self._positional = len(args)
        self.keywords = tuple(kwargs)
        values = (*args, *kwargs.values())
        leaves, spec = tree_flatten(values)
        #: None where each argument is a tensor.
        self._spec: TreeSpec | None = None if all(a is b for a, b in zip(leaves, values)) else spec
        self.names = [self._name(path) for path, _ in tree_flatten_with_path(values)[0]]
        self.buffers: list[torch.Tensor] = leaves
        self.defaults = _defaults(function)
        self.takes_microbatch = _MICROBATCH in self.defaults

    def _name(self, path: Any) -> str:
        position, inside = path[0].idx, keystr(path[1:])
        if position < self._positional:
            return f"argument {position}{inside}"
        return f"{self.keywords[position - self._positional]}{inside}"

    def check_samples(self, device: torch.device) -> None:
        """Make sure that graphs can read the samples, all of them on one device.

        Raises:
            TypeError, ValueError: a sample that they cannot read; it is named.
        """
        for name, sample in zip(self.names, self.buffers):
            where = f"{NAME}: sample {name} of {self.owner}"
            if type(sample) not in PLAIN:
                raise TypeError(
                    f"{where} must be a tensor, got {sample!r:.80}; leave it out, or bind it with functools.partial"
                )
            if sample.device != device:
                raise ValueError(f"{where} must be on {device} like what else is captured, got one on {sample.device}")
            if sample.grad_fn is not None:
                raise ValueError(
                    f"{where} was computed with gradients, and its graph would be captured, too: pass "
                    "sample.detach().requires_grad_()"
                )
            if sample.requires_grad and hooks_of(sample):
                raise ValueError(f"{where} has gradient hooks, which a replay would run a second time: remove them")
            if sample.is_inference():
                raise ValueError(f"{where} was made in inference mode, and cannot be written to: pass sample.clone()")

    def separate(self, taken: set[int]) -> None:
        """Have memory of one's own for each sample. `taken`: addresses of other calls' buffers; gets those of these."""
        for position, sample in enumerate(self.buffers):
            if sample.data_ptr() in taken and sample.numel():
                self.buffers[position] = sample.detach().clone().requires_grad_(sample.requires_grad)
            taken.add(self.buffers[position].data_ptr())

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with the buffers."""
        values = self.buffers if self._spec is None else tree_unflatten(self.buffers, self._spec)
        return tuple(values[: self._positional]), dict(zip(self.keywords, values[self._positional :]))

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, in the order of the buffers.

        Raises:
            TypeError, ValueError: arguments that were not captured, or that look otherwise; they are named.
        """
        if len(args) != self._positional:
            raise TypeError(f"{self.owner} was captured with {self._positional} positional arguments, got {len(args)}")
        values: Any = args
        if self.keywords or kwargs:
            values = (*args, *self._from_keywords(kwargs))
        if self._spec is not None:
            values, spec = tree_flatten(values)
            if spec != self._spec:
                raise TypeError(f"{self.owner} was captured with arguments like {self._spec}, got {spec}")
        records = torch.is_grad_enabled()
        for buffer, value in zip(self.buffers, values):
            if value is not buffer and (
                type(value) not in PLAIN
                or value.shape != buffer.shape
                or value.dtype is not buffer.dtype
                or value.device != buffer.device
                or (records and value.requires_grad and not buffer.requires_grad)
            ):
                raise self._differs(values)
        return list(values)

    def _from_keywords(self, kwargs: Mapping[str, Any]) -> list[Any]:
        """The values of the keywords that were captured; others must not ask for anything else than was."""
        for name, value in kwargs.items():
            if name not in self.keywords and not self._is_default(name, value):
                raise TypeError(
                    f"{self.owner} was captured without {name}, got {value!r:.80}; pass it in sample_kwargs, or leave "
                    "it out"
                )
        missing = [name for name in self.keywords if name not in kwargs]
        if missing:
            raise TypeError(f"{self.owner} was captured with {missing[0]}, which is missing now")
        return [kwargs[name] for name in self.keywords]

    def _is_default(self, name: str, value: Any) -> bool:
        """Whether a keyword argument asks for what the callable does without it."""
        default = self.defaults.get(name, inspect.Parameter.empty)
        return value is default or (type(value) is type(default) and isinstance(value, _COMPARED) and value == default)

    def _differs(self, values: list[Any]) -> Exception:
        for name, buffer, value in zip(self.names, self.buffers, values):
            if type(value) not in PLAIN:
                return TypeError(f"{self.owner}: {name} must be a tensor as when it was captured, got {value!r:.80}")
            if value.requires_grad and not buffer.requires_grad:
                return ValueError(
                    f"{self.owner}: {name} requires a gradient, which was not captured; pass a sample that requires one"
                )
            here, there = _look(value), _look(buffer)
            if here != there:
                return ValueError(f"{self.owner}: {name} must be {there} as when it was captured, got {here}")
        raise AssertionError("the arguments do not differ")


#: Kinds of defaults that are compared by value.
_COMPARED = (bool, int, float, str, tuple)


def hooks_of(tensor: torch.Tensor) -> bool:
    """Whether a leaf has hooks that run on its gradient."""
    return bool(getattr(tensor, "_backward_hooks", None))


def _look(x: torch.Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)} on {x.device}"


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function's parameters are when they are left out."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return {}
    empty = inspect.Parameter.empty
    return {name: parameter.default for name, parameter in parameters.items() if parameter.default is not empty}
