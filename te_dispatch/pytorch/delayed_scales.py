# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The state of delayed scaling: amax histories and scales of one module in one direction.

It is neither parameter nor buffer: a module's ``.bfloat16()`` must not touch it, DDP must not broadcast it, and FSDP
must not shard it. Modules keep it as a plain attribute, move it with their parameters and save it as extra state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.pytorch.compile import keep_static

if TYPE_CHECKING:
    from te_dispatch.pytorch.scale_update import ScaleGroup


class DelayedScales:
    """Histories and scales of `count` tensors.

    Attributes:
        history: float32 (length, count). Row 0 collects this step's amaxes, row 1 is the oldest step remembered, the
            last row the newest.
        scale: float32 (count,), in force.
        amax_views, scale_views: float32 (1,) each: row 0 and the scales by tensor. They are made once, because
            indexing on every cast costs more than the cast's launch.
        max_values: where each tensor's cast saturates; () until a recipe is bound.
        group: the `ScaleGroup` that updates them, None until a recipe is bound.
    """

    __slots__ = ("history", "scale", "amax_views", "scale_views", "max_values", "group", "_frozen", "__weakref__")

    def __init__(self, history: torch.Tensor, scale: torch.Tensor, max_values: Sequence[float] = ()) -> None:
        self.max_values = tuple(max_values)
        self.group: ScaleGroup | None = None
        self._adopt(history, scale)

    @classmethod
    def fresh(cls, length: int, count: int, device: torch.device) -> DelayedScales:
        """Empty histories and scales of 1."""
        # A tensor born in inference mode could never be updated by a later training step.
        with torch.inference_mode(False):
            return cls(
                torch.zeros(length, count, dtype=torch.float32, device=device),
                torch.ones(count, dtype=torch.float32, device=device),
            )

    def _adopt(self, history: torch.Tensor, scale: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.history = history
            self.scale = scale
            self.amax_views = [history[0, i : i + 1] for i in range(scale.numel())]
            self.scale_views = [scale[i : i + 1] for i in range(scale.numel())]
        self._frozen: list[torch.Tensor] | None = None
        keep_static(history, scale)

    @property
    def device(self) -> torch.device:
        return self.scale.device

    @property
    def count(self) -> int:
        return self.scale.numel()

    @property
    def length(self) -> int:
        return self.history.shape[0]

    def frozen_scales(self) -> list[torch.Tensor]:
        """Copies of the scales in force, for a recompute after the next update; one copy per update, then shared."""
        if self._frozen is None:
            with torch.inference_mode(False), torch.no_grad():
                copy = self.scale.clone()
                self._frozen = [copy[i : i + 1] for i in range(self.count)]
        return self._frozen

    def updated(self) -> None:
        """The scales were changed in place."""
        self._frozen = None

    def move(self, device: torch.device) -> None:
        if device != self.device:
            self._adopt(self.history.to(device), self.scale.to(device))

    def resize(self, length: int) -> None:
        """Remember `length` steps; what is kept is the current row and the newest ones."""
        old = self.history
        if length == old.shape[0]:
            return
        with torch.inference_mode(False), torch.no_grad():
            history = torch.zeros(length, self.count, dtype=torch.float32, device=self.device)
            history[0] = old[0]
            kept = min(length, old.shape[0]) - 1
            if kept:
                history[-kept:] = old[-kept:]
            self._adopt(history, self.scale)

    def retarget(self, max_values: Sequence[float]) -> None:
        """Bind to casts that saturate at `max_values`; scales made for other maxima (another encoding) follow."""
        max_values = tuple(max_values)
        if self.max_values and self.max_values != max_values:
            ratio = [new / old for new, old in zip(max_values, self.max_values)]
            with torch.no_grad():
                self.scale.mul_(torch.tensor(ratio, dtype=torch.float32, device=self.device))
            self.updated()
        self.max_values = max_values

    def as_data(self) -> dict[str, Any]:
        """Plain tensors and lists, as ``torch.load(weights_only=True)`` reads them."""
        return {
            "amax_history": self.history.detach().clone(),
            "scale": self.scale.detach().clone(),
            "max_values": list(self.max_values),
        }

    def load(self, other: DelayedScales) -> None:
        """Take another's values: in place where shapes agree, so that captured graphs keep their addresses."""
        if other.history.shape == self.history.shape:
            with torch.no_grad():
                self.history.copy_(other.history)
                self.scale.copy_(other.scale)
            self.updated()
        else:
            self._adopt(other.history.to(self.device), other.scale.to(self.device))
        self.max_values = other.max_values

    @classmethod
    def from_data(cls, data: dict[str, Any], count: int, where: str) -> DelayedScales:
        """Read what `as_data` wrote.

        Raises:
            RuntimeError: shapes that are not a state of `count` tensors; `where` starts the message.
        """
        history, scale = data["amax_history"], data["scale"]
        if history.dim() != 2 or history.shape[0] < 1 or history.shape[1] != count or tuple(scale.shape) != (count,):
            raise RuntimeError(
                f"{where}: amax_history must be (length, {count}) and scale ({count},), got "
                f"{tuple(history.shape)} and {tuple(scale.shape)}"
            )
        with torch.inference_mode(False):
            return cls(
                history.detach().to(torch.float32, copy=True),
                scale.detach().to(torch.float32, copy=True),
                data.get("max_values", ()),
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles get their own views; the group binds anew at the next use.
        return _restore, (self.history.clone(), self.scale.clone(), self.max_values)


def _restore(history: torch.Tensor, scale: torch.Tensor, max_values: tuple[float, ...]) -> DelayedScales:
    return DelayedScales(history, scale, max_values)
