# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The delayed-scaling states of one GEMM module: which there are, how they move, how they are saved."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.pytorch.fp8 import extra_state
from te_dispatch.pytorch.fp8.amax_reduction import Origin
from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales, StateError
from te_dispatch.pytorch.fp8.empty_entry import EmptyEntry, received
from te_dispatch.pytorch.fp8.transformer_engine_state import of_transformer_engine

#: Of states that were saved as dicts.
_DICT_FORMAT = 1


class ModuleScales:
    """The delayed-scaling states of one module. Each is None until something needs it.

    They are kept apart from the module's parameters and buffers: dtype casts leave them alone, DDP and FSDP do not see
    them.

    Args:
        module: the class of the module, for messages and for the names under which ranks know the states.
        gemm_count: how many weights it has; each has an input, a weight and a gradient that are cast.

    Attributes:
        forward: of the input and the weight of each GEMM in turn. backward: of the gradients of their outputs. Both are
            made at the first use of delayed scaling.
        output, input_grad: of the module's output and of its input's gradient, made when one is to leave the module
            quantized.
        origin: names the states for other ranks.
    """

    def __init__(self, module: str, gemm_count: int) -> None:
        self.module = module
        self.origin = Origin(module)
        self.forward: DelayedScales | None = None
        self.backward: DelayedScales | None = None
        self.output: DelayedScales | None = None
        self.input_grad: DelayedScales | None = None
        #: Tensors of each state, by its attribute, which is its name in the extra state too.
        self._counts = {"forward": 2 * gemm_count, "backward": gemm_count, "output": 1, "input_grad": 1}
        self._gemm_count = gemm_count

    def live(self) -> dict[str, DelayedScales]:
        """The states that there are, by their names."""
        found = {name: getattr(self, name) for name in self._counts}
        return {name: scales for name, scales in found.items() if scales is not None}

    def identity(self) -> list[Any]:
        """What a plan of delayed scaling depends on and cannot follow: memory and maxima."""
        return [
            None if scales is None else (scales.history.data_ptr(), scales.max_values, scales.group)
            for scales in (self.forward, self.backward)
        ]

    def of_gemms(self, recipe: DelayedScaling, device: torch.device) -> tuple[DelayedScales, DelayedScales]:
        """The states of the GEMMs, forward and backward, on a device and as long as the recipe's history."""
        return self._fitted("forward", recipe, device), self._fitted("backward", recipe, device)

    def of_boundary(self, recipe: DelayedScaling, device: torch.device) -> tuple[DelayedScales, DelayedScales]:
        """The states of what leaves the module quantized: its output, its input's gradient."""
        return self._fitted("output", recipe, device), self._fitted("input_grad", recipe, device)

    def _fitted(self, name: str, recipe: DelayedScaling, device: torch.device) -> DelayedScales:
        scales: DelayedScales | None = getattr(self, name)
        if scales is None:
            scales = DelayedScales.fresh(recipe.amax_history_len, self._counts[name], device)
            setattr(self, name, scales)
        scales.label = f"{self.origin.name}/{name}"
        scales.move(device)
        scales.resize(recipe.amax_history_len)
        return scales

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move as `torch.nn.Module._apply` moves parameters with `fn`."""
        for scales in self.live().values():
            # Only where fn moves tensors is of interest: a float32 probe tells, whatever it does to dtypes.
            with torch.no_grad():
                device = fn(torch.zeros((), dtype=torch.float32, device=scales.device)).device
            if device.type != "meta":
                scales.move(device)

    def encoded(self) -> torch.Tensor:
        """The states as bytes (`te_dispatch.pytorch.fp8.extra_state`), an `EmptyEntry` before their first use."""
        live = self.live()
        if "forward" not in live or "backward" not in live:
            return EmptyEntry()  # before the first use, or in the middle of one that was interrupted
        return extra_state.encoded({name: scales.as_data() for name, scales in live.items()})

    def load(self, state: Any, device: torch.device | None) -> bool:
        """Take what `encoded` gave, or Transformer Engine's extra state, or that of an older version.

        Another history length than the recipe's is adapted at the next use: the newest steps are kept.

        Args:
            device: where states are made that there are none of yet; None where nobody knows.

        Returns:
            Whether anything was taken: an empty tensor, and None, change nothing.

        Raises:
            RuntimeError: a state that is not one of this module's, or with values that no training leaves, such as a
                scale of 0. Nothing is changed then.
        """
        where = f"{self.module}: extra state"
        saved = _decoded(received(state), self._gemm_count, where)
        if not saved:
            return False
        unknown = [name for name in saved if name not in self._counts]
        if unknown:
            raise StateError(f"{where} has no {unknown[0]!r}, only {', '.join(self._counts)}")
        loaded = {}
        for name, count in self._counts.items():
            if name in saved:
                loaded[name] = DelayedScales.from_data(saved[name], count, f"{where}, {name}")
            elif name in ("forward", "backward"):  # the others are there where something left the module quantized
                raise StateError(f"{where} must have {name!r}, got {', '.join(map(str, saved))}")
        for name, scales in loaded.items():
            live = getattr(self, name)
            if live is not None:
                live.load(scales)
                continue
            if device is not None:
                scales.move(device)
            setattr(self, name, scales)
        return True


def _decoded(state: Any, gemms: int, where: str) -> extra_state.States:
    """What a checkpoint holds for a module, in whichever of the known formats."""
    if state is None:
        return {}
    if isinstance(state, io.BytesIO):
        content = state.getvalue()
        return of_transformer_engine(content, gemms, where) if content else {}
    if isinstance(state, torch.Tensor):
        if not state.numel():
            return {}
        if state.dtype != torch.uint8 or state.dim() != 1:
            raise StateError(f"{where} must be a vector of uint8, got {state.dtype} of shape {tuple(state.shape)}")
        if extra_state.is_ours(state):
            return extra_state.decoded(state, where)
        return of_transformer_engine(extra_state.as_bytes(state), gemms, where)
    if not isinstance(state, dict) or state.get("format") != _DICT_FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise StateError(f"{where} must be a tensor of bytes, or a dict of format {_DICT_FORMAT}, got {found!r}")
    return {key: data for key, data in state.items() if key not in ("format", "recipe")}
