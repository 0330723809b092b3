# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What frameworks ask of a Transformer Engine module about its quantization, answered from the state here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.pytorch.fp8.autocast import current_state
from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor
from te_dispatch.pytorch.tensor.quantizer import Quantizer as TensorQuantizer
from te_dispatch.pytorch.tensor.quantizers import as_quantizer

if TYPE_CHECKING:
    from te_dispatch.pytorch.fp8.casts import GemmCasts, Plan
    from te_dispatch.pytorch.fp8.module_state import Fp8State
    from te_dispatch.pytorch.fp8.quantized_io import Boundary

#: Names of the states of delayed scaling in `get_fp8_meta_tensors`, by their names in the extra state.
_KEYS = {"forward": "scaling_fwd", "backward": "scaling_bwd", "output": "output", "input_grad": "input_grad"}


class Fp8Meta(Mapping[str, Any]):
    """What a module's last quantized call ran under; read-only, and empty before the first.

    Keys: ``recipe``, ``fp8_group`` and ``num_gemms``. The tensors of delayed scaling, ``scaling_fwd`` and
    ``scaling_bwd`` there, are read and written with `get_fp8_meta_tensors` and `reset_fp8_meta_tensors`.
    """

    def __init__(self, plan: Plan | None, gemms: int) -> None:
        known = {} if plan is None else {"recipe": plan.recipe, "fp8_group": plan.process_group, "num_gemms": gemms}
        self._known: dict[str, Any] = known

    def __getitem__(self, key: str) -> Any:
        if key in self._known:
            return self._known[key]
        if key in ("scaling_fwd", "scaling_bwd"):
            raise KeyError(f"fp8_meta has no {key!r}: use get_fp8_meta_tensors() and reset_fp8_meta_tensors()")
        has = ", ".join(map(repr, self._known)) or "nothing before the module's first quantized call"
        raise KeyError(f"fp8_meta has no {key!r}, it has {has}")

    def __setitem__(self, key: str, value: Any) -> None:
        raise NotImplementedError(f"fp8_meta[{key!r}] cannot be assigned: the autocast of a call says what it holds")

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"Fp8Meta({self._known!r})"


def _boundary(plan: Plan, casts: GemmCasts) -> Boundary | None:
    """The casts of what leaves the module around one weight. Where nothing has left it quantized, those that the recipe
    would have, with states that nothing uses; None with a `CustomRecipe`, whose factory is not asked for them."""
    if plan.boundary is not None or plan.recipe.custom():
        return plan.boundary

    def states() -> tuple[DelayedScales, DelayedScales]:
        return DelayedScales.fresh(1, 1, plan.device), DelayedScales.fresh(1, 1, plan.device)

    return plan.casts.boundary(casts, states)


def _shown(quantizer: Quantizer | None, stochastic: bool = False) -> TensorQuantizer | None:
    return None if quantizer is None else as_quantizer(quantizer, stochastic)


class StateViews(torch.nn.Module):
    """The attributes and methods of Transformer Engine's base module that its users touch."""

    gemm_count: int
    fp8_state: Fp8State

    @property
    def fp8_initialized(self) -> bool:
        """Whether what quantized calls need has been made. Assign False to have the next one make it anew.

        Scales and histories of delayed scaling stay; `reset_fp8_meta_tensors` begins those anew.
        """
        return self.fp8_state.plan is not None

    @fp8_initialized.setter
    def fp8_initialized(self, value: bool) -> None:
        if not value:
            self._forget_plan()
        elif self.fp8_state.plan is None:
            raise ValueError(f"{type(self).__name__}.fp8_initialized becomes True by a call or init_fp8_metadata()")

    @property
    def fp8_meta(self) -> Fp8Meta:
        """What the last quantized call ran under."""
        return Fp8Meta(self.fp8_state.plan, self.gemm_count)

    @property
    def fp8(self) -> bool:
        """Whether a call now would quantize, by the autocast in force."""
        state = current_state()
        return state is not None and state.enabled

    @property
    def fp8_calibration(self) -> bool:
        """Whether a call now would record amaxes only, by the autocast in force."""
        state = current_state()
        return state is not None and state.calibrating

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype that a call now would compute in and return: that of torch.autocast where it is on, else that of
        the parameters, which inputs then have to have."""
        parameter = next(self.parameters(recurse=False))
        device = parameter.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype

    @property
    def quantizers(self) -> dict[str, list[TensorQuantizer | None]]:
        """The casts of the last quantized call, made anew; assigning to them changes nothing.

        ``scaling_fwd`` has those of each weight's input, itself and output, ``scaling_bwd`` those of the gradients of
        its output and input. Where an output or an input's gradient has not left the module quantized, it is the
        recipe's cast of an input or a gradient, which nothing uses; with a `CustomRecipe` None. All are None where a
        weight's products run in high precision. Empty before the first quantized call. With delayed scaling, scales
        and amaxes are those in use, and of a cast that nothing uses ones and zeros.
        """
        forward: list[TensorQuantizer | None] = []
        backward: list[TensorQuantizer | None] = []
        plan = self.fp8_state.plan
        if plan is None:
            return {"scaling_fwd": forward, "scaling_bwd": backward}
        for casts in plan.gemms:
            if casts is None:
                forward += [None, None, None]
                backward += [None, None]
                continue
            forward += [_shown(casts.input), _shown(casts.weight)]
            backward.append(_shown(casts.grad, casts.stochastic))
            boundary = _boundary(plan, casts)
            forward.append(None if boundary is None else _shown(boundary.output))
            backward.append(None if boundary is None else _shown(boundary.input_grad, boundary.stochastic))
        return {"scaling_fwd": forward, "scaling_bwd": backward}

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Whether a parameter is a `QuantizedTensor`."""
        return any(isinstance(parameter, QuantizedTensor) for parameter in self.parameters(recurse=False))

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Make what quantized calls need under the autocast in force, without a call. Nothing outside of any.

        Args:
            num_gemms: weights of the module: 2 for `LayerNormMLP`, else 1.

        Raises:
            ValueError: it has another number of weights.
        """
        if num_gemms != self.gemm_count:
            raise ValueError(
                f"{type(self).__name__}.init_fp8_metadata: num_gemms must be {self.gemm_count}, got {num_gemms!r}"
            )
        state, parameter = current_state(), next(self.parameters(), None)
        if state is not None and (state.enabled or state.calibrating) and parameter is not None:
            self.fp8_state.plan_for(self, state, parameter.device, False)  # type: ignore[arg-type]

    def get_fp8_meta_tensors(self) -> dict[str, list[torch.Tensor]] | None:
        """Copies of the state of delayed scaling, None before its first use.

        Returns:
            For ``scaling_fwd`` (input and weight of each GEMM in turn), ``scaling_bwd`` (their gradients), and, where
            something left the module quantized, ``output`` and ``input_grad``: scales (n,), histories of amaxes
            (length, n) and the amaxes that made the scales (n,), float32.
        """
        live = self.fp8_state.scales.live()
        if "forward" not in live or "backward" not in live:
            return None
        return {_KEYS[key]: [tensor.clone() for tensor in scales.values()] for key, scales in live.items()}

    def reset_fp8_meta_tensors(self, fp8_meta_tensors: Mapping[str, Sequence[torch.Tensor]] | None = None) -> None:
        """Begin delayed scaling anew: scales of 1, empty histories; for warm-up steps that must leave no trace.

        Args:
            fp8_meta_tensors: what `get_fp8_meta_tensors` gave, to be written instead.

        Raises:
            KeyError: a state that `fp8_meta_tensors` lacks. ValueError: tensors that do not fit. Nothing is written.
        """
        writes: list[tuple[DelayedScales, Sequence[torch.Tensor] | None]] = []
        for key, scales in self.fp8_state.scales.live().items():
            given, name = None, _KEYS[key]
            if fp8_meta_tensors is not None:
                if name not in fp8_meta_tensors:
                    raise KeyError(f"fp8_meta_tensors has no {name!r}, it has {', '.join(map(repr, fp8_meta_tensors))}")
                given = fp8_meta_tensors[name]
                shapes = [tuple(tensor.shape) for tensor in scales.values()]
                if [tuple(tensor.shape) for tensor in given] != shapes:
                    raise ValueError(
                        f"fp8_meta_tensors[{name!r}] must be tensors of shapes {shapes}, got "
                        f"{[tuple(tensor.shape) for tensor in given]}"
                    )
            writes.append((scales, given))
        for scales, given in writes:
            scales.assign(given)

    def fast_setattr(self, name: str, value: Any) -> None:
        """``setattr(self, name, value)``."""
        setattr(self, name, value)

    def module_setattr(self, name: str, value: Any) -> None:
        """``setattr(self, name, value)``."""
        setattr(self, name, value)

    if TYPE_CHECKING:  # what `GemmModule` has

        def _forget_plan(self) -> None: ...


def assert_warmed_up(module: torch.nn.Module) -> None:
    """Raise unless a module can be exported with the scales it was trained with, under the autocast in force.

    Only delayed scaling needs it: a module that never ran has scales of 1. Under other recipes, and outside of any
    autocast, nothing is asked for.

    Raises:
        AssertionError: a module of this package in it has no state of delayed scaling yet; it is named.
    """
    state = current_state()
    if state is None or not state.enabled or not isinstance(state.recipe, DelayedScaling):
        return
    for name, part in module.named_modules():
        if isinstance(part, StateViews) and part.get_fp8_meta_tensors() is None:
            raise AssertionError(
                f"{type(part).__name__} {name!r} has not run under DelayedScaling: its scales are 1; run the model "
                "under the recipe, or load a checkpoint, before it is exported"
            )
