# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The steps of attention's Function for one kind of call, as `settled` has them for a product: of query, key and value,
and no other tensors.

A kind is found again by the looks of its operands and by what it was called with (`KnownAttention`), so neither is
worked out in every step; the operators' calls are bound (`te_dispatch.core.repeating`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.core import scopes
from te_dispatch.core.repeating import repeating
from te_dispatch.ops.checks.likeness import PLAIN, Likeness, alike
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch.pytorch.attention_inputs import shared_packing

if TYPE_CHECKING:
    from te_dispatch.pytorch.attention_function import AttentionCall

Tensors = tuple[torch.Tensor, ...]
#: Query, key, value, all three packed, key and value packed; None for what was not given.
Given = tuple[torch.Tensor | None, ...]


class AttentionSteps:
    """Attributes:
    scope: the bindings of the forward. call: that settled these steps.
    needs: `ctx.needs_input_grad` of the Function; its backward may be asked for less, and then takes the long way.
    merged: shape of the output with its heads merged.
    saved: what the operator's forward leaves for its backward, without its tensors.
    backward, fits: None until there was a backward; what gradients of the output it serves.
    whole: shape of the packed gradient that dq, dk and dv, or dk and dv, are views of; None where they are none.
    """

    __slots__ = ("scope", "call", "needs", "forward", "merged", "saved", "backward", "fits", "whole")

    def __init__(
        self, call: AttentionCall, needs: tuple[bool, ...], forward: Callable[..., AttentionForward], merged: Any,
        saved: Saved,
    ) -> None:  # fmt: skip
        self.scope = scopes.capture()
        self.call = call
        self.needs = needs
        self.forward = forward
        self.merged = tuple(merged)
        self.saved = saved
        self.backward: Callable[..., AttentionBackward] | None = None
        self.fits: Likeness | None = None
        self.whole: torch.Size | None = None

    @classmethod
    def of(
        cls, call: AttentionCall, needs: tuple[bool, ...], operands: Tensors, result: AttentionForward, merged: Any
    ) -> AttentionSteps | None:
        """The steps of a forward that was just made; None where such calls have to go the long way.

        Args:
            operands: query, key and value as the operator was given them. merged: as the attribute.
        """
        saved = result.saved
        if saved is None or saved.options is not None:  # options may be other ones in every call
            return None
        given = dict(zip(("q", "k", "v"), operands))
        forward = repeating(scopes.capture(), "attention_fwd", tuple(given), **given, **call.fixed)
        return None if forward is None else cls(call, needs, forward, merged, Saved(saved.implementation, saved.format))

    def run(self, ctx: Any, given: tuple[torch.Tensor | None, ...], operands: Tensors) -> torch.Tensor:
        """The forward: `given` are the Function's operands, `operands` what is to be attended."""
        result = self.forward(*operands)
        ctx.save_for_backward(*given, result.out, result.lse, *result.saved.tensors)  # type: ignore[union-attr]
        return result.out.view(self.merged)

    def left(self, tensors: Sequence[torch.Tensor]) -> Saved:
        """What a forward left, with its tensors."""
        saved = self.saved
        return Saved(saved.implementation, saved.format, tuple(tensors)) if tensors else saved

    def gradients(
        self, dout: torch.Tensor, operands: Tensors, out: torch.Tensor, lse: torch.Tensor, saved: Saved
    ) -> AttentionBackward | None:
        """Gradients of the operands; None where this gradient has to go the long way."""
        if self.fits is None or not self.fits(dout):
            return None
        return self.backward(dout.view(out.shape), *operands, out, lse, saved)  # type: ignore[misc]

    def learn(
        self, dout: torch.Tensor, operands: Tensors, out: torch.Tensor, lse: torch.Tensor, saved: Saved,
        joined: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Settle the backward, of one that was just made; `joined` is the packed gradient that its parts share."""
        if dout.__class__ not in PLAIN or not dout.is_contiguous():
            return
        names = ("dout", "q", "k", "v", "out", "lse", "saved")
        given = dict(zip(names, (dout.view(out.shape), *operands, out, lse, saved)))
        backward = repeating(self.scope, "attention_bwd", names, **given, **self.call.fixed)
        if backward is not None:
            self.backward, self.whole = backward, None if joined is None else joined.shape
            self.fits = alike((dout,), (True,))  # last: another thread may be looking

    def joined(self, gradients: Tensors) -> torch.Tensor | None:
        """The packed tensor that these are the parts of; None where that is not known.

        The implementation is the one whose parts were looked at, so they are where they were.
        """
        base = gradients[0]._base
        if base is None or base.shape != self.whole or any(x._base is not base for x in gradients):
            return None
        return base


class KnownAttention:
    """A kind of call of one module.

    Attributes:
        arguments: what it was called with beside tensors. given: which operands there are. fits: how they look.
        packing: that of three operands given apart, which their looks do not tell.
        scope: the bindings. deterministic: PyTorch's flag, which no attribute or argument tells.
        call: for the Function; None until that was called.
    """

    __slots__ = ("arguments", "given", "fits", "packing", "deterministic", "scope", "call")

    def __init__(self, operands: Given, arguments: Any, packing: str | None) -> None:
        present = [x for x in operands if x is not None]
        self.arguments = arguments
        self.given = tuple([x is not None for x in operands])
        self.fits = alike(present, [True] * len(present))
        self.packing = packing
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.scope = scopes.capture()
        self.call: AttentionCall | None = None

    def serves(self, operands: Given, arguments: Any) -> bool:
        """Whether a call with these operands is one of this kind."""
        present = [x for x in operands if x is not None]
        return (
            self.arguments == arguments
            and self.scope is scopes.capture()
            and tuple([x is not None for x in operands]) == self.given
            and self.fits(*present)
            and self.deterministic is torch.are_deterministic_algorithms_enabled()
            and (len(present) < 3 or shared_packing(*present) == self.packing)
        )
