# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Warm-up and capture of several calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from te_dispatch.pytorch.fp8 import scale_update
from te_dispatch.pytorch.fp8.autocast import autocast, restored, thread
from te_dispatch.pytorch.graphs.callables import check_outputs
from te_dispatch.pytorch.graphs.captured import Captured
from te_dispatch.pytorch.graphs.graphs import Graph, Graphs, random_states_kept
from te_dispatch.pytorch.graphs.recording import Recording, Scaled
from te_dispatch.pytorch.graphs.schedule import Schedule
from te_dispatch.pytorch.graphs.settings import NAME, Settings
from te_dispatch.pytorch.graphs.signature import Signature
from te_dispatch.pytorch.modules.gemm_module import GemmModule


class Session:
    """One `make_graphed_callables`.

    Args:
        callables: what is captured. schedule: calls of them, whose arguments look as `signatures` say.
        graphs: captures.
    """

    def __init__(
        self,
        callables: Sequence[Callable[..., Any]],
        schedule: Schedule,
        signatures: Sequence[Signature],
        settings: Settings,
        graphs: Graphs,
    ) -> None:
        self._callables = callables
        self._schedule = schedule
        self._settings = settings
        self._graphs = graphs
        self._recording = Recording()
        #: Modules with delayed scaling, by callable and plan.
        self._scaled: list[dict[int, Scaled]] = [{} for _ in callables]
        self.calls = [self._call(owner, signature) for owner, signature in zip(schedule.owners, signatures)]

    def _call(self, owner: int, signature: Signature) -> Captured:
        function, settings = self._callables[owner], self._settings
        parameters = function.parameters() if isinstance(function, torch.nn.Module) else ()
        state = self._autocast(owner)._state if settings.quantizes(owner) else None
        return Captured(signature, list(parameters), state, settings.clones)

    def _autocast(self, owner: int) -> autocast:
        settings = self._settings
        return autocast(
            settings.enabled[owner], settings.calibrating, settings.recipe, settings.amax_reduction_group, True
        )

    def run(self, device: torch.device) -> list[Captured]:
        """Capture all calls; states of delayed scaling and random states are as before afterwards."""
        if thread.state is None:
            # Those of an interrupted backward. The autocasts of the captures would do it, inside of graphs.
            scale_update.update_leftover_backward_scales()
        with random_states_kept(device):
            try:
                if self._settings.before is not None:
                    self._settings.before()
                with self._graphs.warming_up():
                    for call in self._schedule.forwards():
                        self._warm_up(call)
                if self._settings.after is not None:
                    self._settings.after()
                with self._graphs.capturing():
                    self._capture()
            finally:
                self._recording.restore()
        return self.calls

    @contextmanager
    def _inside(self, owner: int) -> Iterator[None]:
        """Where the modules of a callable run."""
        with ExitStack() as stack:
            stack.enter_context(self._recording.active(self._scaled[owner]))
            stack.enter_context(self._autocast(owner) if self._settings.quantizes(owner) else restored(None))
            if self._settings.caches:
                stack.enter_context(_later_microbatches(self._modules(owner)))
            yield

    def _modules(self, owner: int) -> list[GemmModule]:
        """The modules of a callable that have weights to be quantized."""
        function = self._callables[owner]
        assert isinstance(function, torch.nn.Module)
        return [module for module in function.modules() if isinstance(module, GemmModule)]

    def _outputs(self, call: int) -> tuple[list[Any], Any]:
        """What a call returns for its buffers, flat, and how it was nested."""
        owner = self._schedule.owners[call]
        args, kwargs = self.calls[call].signature.arguments()
        with torch.set_grad_enabled(self.calls[call].trains), self._inside(owner):
            return tree_flatten(self._callables[owner](*args, **kwargs))

    def _gradients(
        self, call: int, outputs: Sequence[Any], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Gradients of buffers and parameters, None for those that take none.

        Raises:
            ValueError: one that takes one has none, and `allow_unused_input` is not set.
        """
        captured = self.calls[call]
        surface = captured.surface()
        wanted = [tensor for tensor in surface if tensor.requires_grad]
        tensors = [x for x in outputs if isinstance(x, torch.Tensor)]
        pairs = [(x, gradient) for x, gradient in zip(tensors, gradients) if gradient is not None]
        with self._inside(self._schedule.owners[call]):
            found = torch.autograd.grad(
                [x for x, _ in pairs],
                wanted,
                [gradient for _, gradient in pairs],
                retain_graph=self._settings.retain_graph,
                allow_unused=True,
            )
        missing = next((x for x, gradient in zip(wanted, found) if gradient is None), None)
        if missing is not None and not self._settings.allow_unused:
            place = next(place for place, tensor in enumerate(surface) if tensor is missing)
            names = captured.signature.names
            what = names[place] if place < len(names) else f"a parameter of shape {tuple(missing.shape)}"
            raise ValueError(
                f"{NAME}: {what} of {captured.signature.owner} requires a gradient and got none in the warm-up; pass "
                "allow_unused_input=True if that is meant"
            )
        gradients_found = iter(found)
        return [next(gradients_found) if tensor.requires_grad else None for tensor in surface]

    def _warm_up(self, call: int) -> None:
        captured = self.calls[call]
        for iteration in range(self._settings.warmups):
            outputs, _ = self._outputs(call)
            zeros = _zeros(outputs)
            if iteration == 0:
                check_outputs(captured.signature.owner, outputs, captured.surface())
            if any(gradient is not None for gradient in zeros):
                self._gradients(call, outputs, zeros)

    def _capture(self) -> None:
        weights = [self._capture_weights(owner) for owner in range(len(self._callables))]
        for step in self._schedule.steps:
            captured = self.calls[step.call]
            if step.forward:
                captured.weights = weights[self._schedule.owners[step.call]]
                self._capture_forward(step.call)
            elif any(gradient is not None for gradient in captured.output_grads):
                self._capture_backward(step.call)
            else:
                captured.forward.release()
        for graph in weights:
            if graph is not None:
                graph.replay()  # a first call may be of a later microbatch
        for call, captured in enumerate(self.calls):
            captured.scaled = list(self._scaled[self._schedule.owners[call]].values())

    def _capture_weights(self, owner: int) -> Graph | None:
        """A graph that quantizes a callable's weights into memory that its other graphs read."""
        if not self._settings.caches or not self._settings.quantizes(owner):
            return None
        modules = self._modules(owner)

        def cache() -> list[Any]:
            with self._inside(owner):
                for module in modules:
                    module.cache_weights()
            return [module.cached_weights() for module in modules]

        # Replayed wherever a first microbatch comes: its temporary memory may not hold what others save.
        return self._graphs.capture(cache, apart=True)

    def _capture_forward(self, call: int) -> None:
        captured, specs = self.calls[call], []

        def forward() -> list[Any]:
            outputs, spec = self._outputs(call)
            specs.append(spec)
            return outputs

        self._recording.renew_frozen_scales()
        captured.forward = self._graphs.capture(forward)
        captured.spec = specs[0]
        results = captured.forward.results
        captured.outputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in results]
        captured.output_grads = _zeros(results)

    def _capture_backward(self, call: int) -> None:
        captured = self.calls[call]

        def backward() -> list[torch.Tensor | None]:
            return self._gradients(call, captured.forward.results, captured.output_grads)

        captured.backward = self._graphs.capture(backward)
        captured.grads = [None if x is None else x.detach() for x in captured.backward.results]
        captured.forward.release()


@contextmanager
def _later_microbatches(modules: Sequence[GemmModule]) -> Iterator[None]:
    """Have modules multiply with the weights that they have cached."""
    handles = [module.register_forward_pre_hook(_as_later_microbatch, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _as_later_microbatch(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a `GemmModule` with ``is_first_microbatch=False`` where they say nothing of it."""
    if len(args) > 1:
        return (args[0], False if args[1] is None else args[1], *args[2:]), kwargs
    if kwargs.get("is_first_microbatch") is None:
        kwargs = {**kwargs, "is_first_microbatch": False}
    return args, kwargs


def _zeros(outputs: Sequence[Any]) -> list[torch.Tensor | None]:
    """By tensor among the outputs: a gradient of it, None for one that takes none."""
    tensors = [x for x in outputs if isinstance(x, torch.Tensor)]
    return [torch.zeros_like(x) if x.requires_grad else None for x in tensors]
