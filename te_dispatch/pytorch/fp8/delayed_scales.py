# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The state of delayed scaling: amax histories and scales of one module in one direction.

It is neither parameter nor buffer: a module's ``.bfloat16()`` must not touch it, DDP must not broadcast it, and FSDP
must not shard it. Modules keep it as a plain attribute, move it with their parameters and save it as extra state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch import ops
from te_dispatch.pytorch.compile import keep_static

if TYPE_CHECKING:
    from te_dispatch.pytorch.fp8.scale_update import ScaleGroup


#: Largest float32, and the largest margin either way that `ops.update_delayed_scales` takes.
_LARGEST = torch.finfo(torch.float32).max
_MARGIN = 1000


class StateError(RuntimeError):
    """A saved state that cannot be loaded."""


class DelayedScales:
    """Histories and scales of `count` tensors.

    Attributes:
        history: float32 (length, count). Row 0 collects this step's amaxes, row 1 is the oldest step remembered, the
            last row the newest.
        scale: float32 (count,), in force.
        scale_amax: float32 (count,), the amax that made the scale in force. It, and not the scale, crosses to another
            encoding: the same amax gives each encoding's own scale, bit for bit. 0 where no amax has made the scale
            yet, which is then 1 in every encoding; NaN where it cannot be told (`scale_amax_unknown`).
        max_values, margin: what the scales were made for: where each tensor's cast saturates, and the powers of two
            below it; () and 0 until a recipe is bound.
        amax_views, scale_views: float32 (1,) each: row 0 and the scales by tensor. They are made once, because
            indexing on every cast costs more than the cast's launch.
        group: the `ScaleGroup` that updates them, None until a training step.
        label: what the ranks of an amax reduction call this state: the module's origin, ``/``, which of its states.
    """

    __slots__ = (
        "history", "scale", "scale_amax", "_max_values", "margin", "amax_views", "scale_views", "group", "label",
        "_frozen", "_frozen_at", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        history: torch.Tensor,
        scale: torch.Tensor,
        scale_amax: torch.Tensor,
        max_values: Sequence[float] = (),
        margin: int = 0,
    ) -> None:
        self.group: ScaleGroup | None = None
        self.label = ""
        self.max_values = tuple(max_values)
        self.margin = margin
        self._adopt(history, scale, scale_amax)

    @classmethod
    def fresh(cls, length: int, count: int, device: torch.device) -> DelayedScales:
        """Empty histories and scales of 1."""
        # A tensor born in inference mode could never be updated by a later training step.
        with torch.inference_mode(False):
            return cls(
                torch.zeros(length, count, dtype=torch.float32, device=device),
                torch.ones(count, dtype=torch.float32, device=device),
                torch.zeros(count, dtype=torch.float32, device=device),
            )

    def _adopt(self, history: torch.Tensor, scale: torch.Tensor, scale_amax: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.history = history
            self.scale = scale
            self.scale_amax = scale_amax
            self.amax_views = [history[0, i : i + 1] for i in range(scale.numel())]
            self.scale_views = [scale[i : i + 1] for i in range(scale.numel())]
        self._frozen: list[torch.Tensor] | None = None
        self._frozen_at = 0
        self._regroup()
        keep_static(history, scale, scale_amax)

    def _regroup(self) -> None:
        """Tell the group that what `operands` gives has changed."""
        if self.group is not None:
            self.group.regroup()

    @property
    def max_values(self) -> tuple[float, ...]:
        return self._max_values

    @max_values.setter
    def max_values(self, values: tuple[float, ...]) -> None:
        self._max_values = values
        self._regroup()

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
        updates = 0 if self.group is None else self.group.updates
        if self._frozen is None or self._frozen_at != updates:
            with torch.inference_mode(False), torch.no_grad():
                copy = self.scale.clone()
                self._frozen, self._frozen_at = [copy[i : i + 1] for i in range(self.count)], updates
        return self._frozen

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, tuple[float, ...], torch.Tensor]:
        """What `ops.update_delayed_scales` takes: history, scales, maxima and amaxes.

        Through .data: a compiled backward that reads the tensors live must not find their version changed.
        """
        return self.history.data, self.scale.data, self.max_values, self.scale_amax.data

    def updated(self) -> None:
        """The scales were changed in place, other than by an update of the group, which counts those itself."""
        self._frozen = None

    def move(self, device: torch.device) -> None:
        """Move to `device`, and out of the group, which is of one device."""
        if device == self.device:
            return
        if self.group is not None:
            self.group.remove(self)
        self._adopt(self.history.to(device), self.scale.to(device), self.scale_amax.to(device))

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
            self._adopt(history, self.scale, self.scale_amax)

    def retarget(self, max_values: Sequence[float], margin: int) -> None:
        """Bind to casts that saturate at `max_values`, with scales `margin` powers of two below that.

        Scales made for others (another encoding, portability or margin) are made again from their amaxes, to the
        bits that the last update would have given had it been made for these. A scale whose amax is unknown is
        multiplied by the ratio of the maxima, to within three roundings of that; the next update mends it.
        """
        old, self.max_values = self.max_values, tuple(max_values)
        moved = bool(old) and (old, self.margin) != (self.max_values, margin)
        self.margin = margin
        if not moved:
            return
        ratio = [new / before for new, before in zip(self.max_values, old)]
        with torch.inference_mode(False), torch.no_grad():
            scale, amax = self.scale.data, self.scale_amax.data
            follows = scale * torch.tensor(ratio, dtype=torch.float32, device=self.device)
            scale.copy_(torch.where(amax.isnan(), follows, scale))
            # An update that remembers this amax alone: the operator's own arithmetic, so its bits. Where the amax is
            # 0 or NaN it keeps the scale.
            ops.update_delayed_scales(
                [amax[None].clone()], [scale], [self.max_values], algorithm="most_recent", margin=margin
            )
        self.updated()

    def as_data(self) -> dict[str, Any]:
        """Plain tensors, lists and numbers, as ``torch.load(weights_only=True)`` reads them."""
        return {
            "amax_history": self.history.detach().clone(),
            "scale": self.scale.detach().clone(),
            "scale_amax": self.scale_amax.detach().clone(),
            "max_values": list(self.max_values),
            "margin": self.margin,
        }

    def values(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scales, histories and the amaxes that made the scales."""
        return self.scale, self.history, self.scale_amax

    def assign(self, values: Sequence[torch.Tensor] | None) -> None:
        """Write other `values` in place; None for those of a state that nothing was cast with.

        Through .data, as `operands` says.
        """
        mine = [tensor.data for tensor in self.values()]
        if values is None:
            for tensor, fill in zip(mine, (1.0, 0.0, 0.0)):
                tensor.fill_(fill)
        else:
            for tensor, value in zip(mine, values):
                tensor.copy_(value)
        self.updated()

    def load(self, other: DelayedScales) -> None:
        """Take another's values: in place where shapes agree, so that captured graphs keep their addresses."""
        theirs = (other.history, other.scale, other.scale_amax)
        if other.history.shape == self.history.shape:
            with torch.no_grad():
                for mine, value in zip((self.history, self.scale, self.scale_amax), theirs):
                    mine.copy_(value)
            self.updated()
        else:
            self._adopt(*(value.to(self.device) for value in theirs))
        self.max_values, self.margin = other.max_values, other.margin

    @classmethod
    def from_data(cls, data: Any, count: int, where: str) -> DelayedScales:
        """Read what `as_data` wrote, or a state from before `scale_amax` was saved: its amaxes are then unknown.

        Raises:
            StateError: not a state of `count` tensors, or values that no update leaves; `where` starts the message.
        """
        if not isinstance(data, dict):
            raise StateError(f"{where} must be a dict, got {type(data).__name__}")
        history = _loaded(data, "amax_history", where)
        if history.dim() != 2 or history.shape[0] < 1 or history.shape[1] != count:
            raise StateError(f"{where}, amax_history must be (length, {count}), got shape {tuple(history.shape)}")
        scale = _loaded(data, "scale", where)
        unknown = data.get("scale_amax") is None
        scale_amax = scale_amax_unknown(scale) if unknown else _loaded(data, "scale_amax", where)
        for name, tensor in (("scale", scale), ("scale_amax", scale_amax)):
            if tuple(tensor.shape) != (count,):
                raise StateError(f"{where}, {name} must be ({count},), got shape {tuple(tensor.shape)}")
        for name, tensor, wanted, wrong in (
            # Casts ignore NaN when they record an amax and keep an infinity, so a history may hold the latter only.
            ("amax_history", history, "not negative and not NaN", history.isnan() | (history < 0)),
            ("scale", scale, "finite and above 0", ~(scale.isfinite() & (scale > 0))),
            ("scale_amax", scale_amax, "finite and not negative, or NaN", scale_amax.isinf() | (scale_amax < 0)),
        ):
            if not tensor.is_meta and bool(wrong.any()):
                place = wrong.nonzero()[0].tolist()
                raise StateError(f"{where}, {name} must be {wanted}, got {tensor[wrong][0].item()} at {place}")
        max_values, margin = data.get("max_values", ()), data.get("margin", 0)
        if not (isinstance(max_values, (list, tuple)) and len(max_values) in (0, count)):
            raise StateError(f"{where}, max_values must be {count} numbers, got {max_values!r}")
        for value in max_values:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LARGEST:
                raise StateError(f"{where}, max_values must be finite and above 0, got {value!r}")
        if isinstance(margin, bool) or not isinstance(margin, int):
            raise StateError(f"{where}, margin must be an int, got {margin!r}")
        if not -_MARGIN <= margin <= _MARGIN:
            raise StateError(f"{where}, margin must be from {-_MARGIN} to {_MARGIN}, got {margin}")
        with torch.inference_mode(False):
            history, scale, scale_amax = (t.clone() for t in (history, scale, scale_amax))
            return cls(history, scale, scale_amax, max_values, margin)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles get their own views; the group binds anew at the next use.
        tensors = (self.history.clone(), self.scale.clone())
        return _restore, (*tensors, self.max_values, self.scale_amax.clone(), self.margin)


def _loaded(data: dict[str, Any], name: str, where: str) -> torch.Tensor:
    tensor = data.get(name)
    if not isinstance(tensor, torch.Tensor):
        got = f"{type(tensor).__name__}" if name in data else f"none among {', '.join(map(str, data))}"
        raise StateError(f"{where}, {name} must be a tensor, got {got}")
    if not tensor.is_floating_point():
        raise StateError(f"{where}, {name} must be float32, got {tensor.dtype}")
    if tensor.layout != torch.strided:
        raise StateError(f"{where}, {name} must be a dense tensor, got {tensor.layout}")
    return tensor.detach().to(torch.float32)  # before values are judged: a float64 may be infinite in float32


def scale_amax_unknown(scale: torch.Tensor) -> torch.Tensor:
    """The `DelayedScales.scale_amax` of scales that another formula made, or whose amax was not saved."""
    return torch.full_like(scale, torch.nan)


def _restore(
    history: torch.Tensor,
    scale: torch.Tensor,
    max_values: tuple[float, ...],
    scale_amax: torch.Tensor | None = None,
    margin: int = 0,
) -> DelayedScales:
    """Unpickle; pickles from before `scale_amax` was kept have three arguments."""
    if scale_amax is None:
        scale_amax = scale_amax_unknown(scale)
    return DelayedScales(history, scale, scale_amax, max_values, margin)
