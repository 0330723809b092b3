# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The delayed-scaling state of a GEMM module: where it is kept, how it moves, how it is saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.pytorch.fp8 import extra_state
from te_dispatch.pytorch.fp8.amax_reduction import Origin
from te_dispatch.pytorch.fp8.autocast import current_state
from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales, StateError

_log = logging.getLogger("te_dispatch")

#: Of states that were saved as dicts.
_DICT_FORMAT = 1


def _states(state: Any, gemms: int, where: str) -> extra_state.States:
    """What a checkpoint holds for a module, in whichever of the known formats."""
    if state is None:
        return {}
    if isinstance(state, torch.Tensor):
        if not state.numel():
            return {}
        if state.dtype != torch.uint8 or state.dim() != 1:
            raise StateError(f"{where} must be a vector of uint8, got {state.dtype} of shape {tuple(state.shape)}")
        if extra_state.is_ours(state):
            return extra_state.decoded(state, where)
        return extra_state.of_transformer_engine(state, gemms, where)
    if not isinstance(state, dict) or state.get("format") != _DICT_FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise StateError(f"{where} must be a tensor of bytes, or a dict of format {_DICT_FORMAT}, got {found!r}")
    return {key: data for key, data in state.items() if key not in ("format", "recipe")}


class SavedModule(torch.nn.Module):
    """A module with ``_extra_state`` in its state_dict, as Transformer Engine's modules have; here an empty one.

    Checkpoints without it load: those of `torch.nn` modules, and of high-precision training.
    """

    def get_extra_state(self) -> torch.Tensor:
        """Nothing, as an empty tensor of bytes."""
        return extra_state.empty()

    def set_extra_state(self, state: Any) -> None:
        """Take what `get_extra_state` gives; warn of what Transformer Engine saves for FP8 attention."""
        if isinstance(state, torch.Tensor) and state.numel():
            _log.warning(
                "%s has no delayed-scaling state; the one in the checkpoint has no effect", type(self).__name__
            )

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}_extra_state"
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        except StateError as error:
            error_msgs.append(f"{key}: {error}")
        if key in missing_keys:
            missing_keys.remove(key)


def has_te_modules(network: Any) -> bool:
    """Whether a module is, or has in it, one of this package's that computes; True for anything but a module, which
    cannot be looked into."""
    if not isinstance(network, torch.nn.Module):
        return True
    return any(isinstance(part, SavedModule) for part in network.modules())


class ScaledModule(SavedModule):
    """A module with delayed-scaling state.

    The state is kept as plain attributes: dtype casts leave it alone, DDP and FSDP do not see it, device moves take it
    along, and `get_extra_state` saves it. Each is None until something needs it: those of the GEMMs until the first
    use of delayed scaling, those of the boundary until something is to leave the module quantized.
    """

    #: How many weights the module has; each has an input, a weight and a gradient that are cast.
    gemm_count = 1

    def __init__(self) -> None:
        super().__init__()
        self._origin = Origin(type(self).__name__)
        self._forward_scales: DelayedScales | None = None
        self._backward_scales: DelayedScales | None = None
        self._output_scales: DelayedScales | None = None
        self._input_grad_scales: DelayedScales | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_origin" not in self.__dict__:  # pickled by a version without
            self._origin = Origin(type(self).__name__)

    def _states(self) -> dict[str, tuple[str, int]]:
        """(attribute, number of tensors) of each state, by its name in the extra state."""
        return {
            "forward": ("_forward_scales", 2 * self.gemm_count),
            "backward": ("_backward_scales", self.gemm_count),
            "output": ("_output_scales", 1),
            "input_grad": ("_input_grad_scales", 1),
        }

    def _live(self) -> dict[str, DelayedScales]:
        """The states that there are."""
        found = {key: getattr(self, attribute) for key, (attribute, _) in self._states().items()}
        return {key: scales for key, scales in found.items() if scales is not None}

    def _scales_identity(self) -> list[Any]:
        """What a plan of delayed scaling depends on and cannot follow: memory and maxima."""
        return [
            None if scales is None else (scales.history.data_ptr(), scales.max_values, scales.group)
            for scales in (self._forward_scales, self._backward_scales)
        ]

    def _scales_for(self, recipe: DelayedScaling, device: torch.device) -> tuple[DelayedScales, DelayedScales]:
        """The states of the GEMMs."""
        return self._fitted("forward", recipe, device), self._fitted("backward", recipe, device)

    def _boundary_scales_for(self, recipe: DelayedScaling, device: torch.device) -> tuple[DelayedScales, DelayedScales]:
        """The states of what leaves the module quantized: its output, its input's gradient."""
        return self._fitted("output", recipe, device), self._fitted("input_grad", recipe, device)

    def _fitted(self, key: str, recipe: DelayedScaling, device: torch.device) -> DelayedScales:
        attribute, count = self._states()[key]
        scales: DelayedScales | None = getattr(self, attribute)
        if scales is None:
            scales = DelayedScales.fresh(recipe.amax_history_len, count, device)
            setattr(self, attribute, scales)
        scales.label = f"{self._origin.name}/{key}"
        scales.move(device)
        scales.resize(recipe.amax_history_len)
        return scales

    def _forget_plan(self) -> None:
        """Let go of what was made for the state as it was."""
        raise NotImplementedError

    def _forget_weights(self) -> None:
        """Let go of quantized weights."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ScaledModule:
        super()._apply(fn, recurse)
        for scales in self._live().values():
            # Only where fn moves tensors is of interest: a float32 probe tells, whatever it does to dtypes.
            with torch.no_grad():
                device = fn(torch.zeros((), dtype=torch.float32, device=scales.device)).device
            if device.type != "meta":
                scales.move(device)
        self._forget_plan()
        return self

    def get_extra_state(self) -> torch.Tensor:
        """The delayed-scaling state as bytes (`te_dispatch.pytorch.fp8.extra_state`), empty before its first use.

        Under an `autocast` with delayed scaling the state is made where there is none yet, so that what reads a
        checkpoint into the tensors of a state_dict finds room for it.
        """
        live, state = self._live(), current_state()
        if not live and state is not None and state.enabled and isinstance(state.recipe, DelayedScaling):
            parameter = next(self.parameters(), None)  # none where a wrapper holds them
            if parameter is not None and not parameter.is_meta:
                self._scales_for(state.recipe, parameter.device)
                live = self._live()
        if "forward" not in live or "backward" not in live:
            live = {}  # before the first use, or in the middle of one that was interrupted
        return extra_state.encoded({key: scales.as_data() for key, scales in live.items()})

    def set_extra_state(self, state: Any) -> None:
        """Take the state of `get_extra_state`, or Transformer Engine's; an empty one, and None, change nothing.

        Another history length than the recipe's is adapted at the next use: the newest steps are kept.

        Raises:
            RuntimeError: a state that is not one of this module's, or with values that no training leaves, such as a
                scale of 0. Nothing is changed then.
        """
        where = f"{type(self).__name__}: extra state"
        saved = _states(state, self.gemm_count, where)
        if not saved:
            return
        known = self._states()
        unknown = [key for key in saved if key not in known]
        if unknown:
            raise StateError(f"{where} has no {unknown[0]!r}, only {', '.join(known)}")
        loaded = {}
        for key, (attribute, count) in known.items():
            if key in saved:
                loaded[attribute] = DelayedScales.from_data(saved[key], count, f"{where}, {key}")
            elif key in ("forward", "backward"):  # the others are there where something left the module quantized
                raise StateError(f"{where} must have {key!r}, got {', '.join(map(str, saved))}")
        parameter = next(self.parameters(), None)  # none where a wrapper holds them
        for attribute, scales in loaded.items():
            live = getattr(self, attribute)
            if live is None:
                if parameter is not None and not parameter.is_meta:
                    scales.move(parameter.device)
                setattr(self, attribute, scales)
            else:
                live.load(scales)
        self._forget_plan()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *others: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *others)
        self._forget_weights()
