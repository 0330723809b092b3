# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where gradients of weights go, if not to autograd: to buffers of the user's, or into products that run later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from te_dispatch.core import scopes
from te_dispatch.ops.results import Gemm
from te_dispatch.pytorch.capture.signatures import CapturedCalls
from te_dispatch.pytorch.fp8.autocast import thread
from te_dispatch.pytorch.modules.main_grads import MainGrads
from te_dispatch.pytorch.modules.parameters import parameter

Product = Callable[..., Gemm]


class WeightSink(Protocol):
    """What a backward hands the product of a weight's gradient to.

    Attributes:
        postpones: whether the product runs after the backward, which must then make the bias's gradient by itself.
    """

    postpones: bool

    def take(self, product: Product) -> Gemm | None:
        """`product` is `te_dispatch.ops.gemm` of its operands; it takes out, accumulate and out_dtype."""

    def returned(self) -> list[torch.Tensor | None]:
        """What the backward returns as the gradients of the parameters that the weight's rows are."""


class PostponedGrads:
    """`delay_wgrad_compute`: products that `backward_dw` runs.

    Args:
        weights: the parameters that the rows of the product's weight are, by name.
        main: where the gradient goes then; None for their attribute ``grad``.
        queue: of that weight's products, the oldest first.
    """

    __slots__ = ("main", "queue", "weights")

    postpones = True

    def __init__(self, weights: Mapping[str, torch.Tensor], main: MainGrads | None, queue: deque[Any]) -> None:
        self.weights = weights
        self.main = main
        self.queue = queue

    def take(self, product: Product) -> None:
        self.queue.append((self, product, scopes.capture()))

    def returned(self) -> list[torch.Tensor | None]:
        return [None] * len(self.weights) if self.main is None else self.main.returned()

    def compute(self, product: Product) -> None:
        """Run a product that was taken."""
        if self.main is not None:
            self.main.take(product)
            return
        weights = list(self.weights.values())
        made = product(out_dtype=weights[0].dtype).out
        assert isinstance(made, torch.Tensor)
        for weight, part in zip(weights, made.split_with_sizes([weight.shape[0] for weight in weights])):
            weight.grad = part if weight.grad is None else weight.grad + part


class WeightGradModule(torch.nn.Module):
    """A module whose weights' gradients need not go to autograd."""

    _fuses_wgrad = False
    _postpones_wgrad = False
    captured_calls: CapturedCalls

    def _keep_gradients(self, given: Mapping[str, Any], names: Sequence[str]) -> None:
        """Take a constructor's arguments; `names` are of the weights."""
        self.fuse_wgrad_accumulation = given["fuse_wgrad_accumulation"]
        self._postpones_wgrad = bool(given["delay_wgrad_compute"])
        self._products: dict[str, deque[Any]] = {}
        self._wgrad_hooks: list[Callable[[], Any]] = []
        if self._postpones_wgrad:
            for name in names:
                # Megatron's data parallelism then waits for `backward_dw`.
                parameter(self, name).skip_backward_post_hook = True  # type: ignore[attr-defined]

    @property
    def fuse_wgrad_accumulation(self) -> bool:
        """Whether gradients of weights are added to ``weight.main_grad`` instead of being returned."""
        return self._fuses_wgrad

    @fuse_wgrad_accumulation.setter
    def fuse_wgrad_accumulation(self, value: bool) -> None:
        self._fuses_wgrad = bool(value)
        self.captured_calls.forget()  # they return gradients

    def need_backward_dw(self) -> bool:
        """Whether gradients of weights wait for `backward_dw`: `delay_wgrad_compute`."""
        return self._postpones_wgrad

    def backward_dw(self) -> None:
        """Compute the gradients of the weights for the oldest backward pass that has left them, then run the hooks.

        Nothing without `delay_wgrad_compute`.

        Raises:
            RuntimeError: no backward pass has left any.
        """
        if not self._postpones_wgrad:
            return
        due = [queue.popleft() for queue in self._products.values() if queue]
        if not due:
            raise RuntimeError(f"{type(self).__name__}.backward_dw: no backward pass has left gradients to compute")
        for grads, product, scope in due:
            with torch.no_grad(), scopes.reenter(scope):
                grads.compute(product)
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Have `backward_dw` call `hook` after it has computed gradients."""
        self._wgrad_hooks.append(hook)

    def _weight_sink(self, names: Sequence[str], is_first_microbatch: bool | None) -> WeightSink | None:
        """Where the gradient of the weight goes that the parameters `names` are the rows of; None for autograd."""
        if not self._fuses_wgrad and not self._postpones_wgrad:
            return None
        owner = type(self).__name__
        argument = "fuse_wgrad_accumulation" if self._fuses_wgrad else "delay_wgrad_compute"
        if thread.recording is not None:
            raise NotImplementedError(f"{owner}: {argument}=True is not supported in make_graphed_callables yet")
        if torch.compiler.is_compiling():
            raise NotImplementedError(f"{owner}: {argument}=True is not supported in a compiled region")
        weights = {name: parameter(self, name) for name in names}
        main = MainGrads(owner, weights, is_first_microbatch is not True) if self._fuses_wgrad else None
        if not self._postpones_wgrad:
            return main
        return PostponedGrads(weights, main, self._products.setdefault(names[0], deque()))
