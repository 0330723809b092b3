# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`activation_recompute_forward`: checkpoints of other programs, such as Megatron's, say which phase they are in."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType

from te_dispatch.pytorch.fp8.autocast import current_state
from te_dispatch.pytorch.fp8.regions import phase


class activation_recompute_forward(ContextDecorator):  # Transformer Engine's name
    """Declare a forward of a checkpoint's function, so that the recomputation quantizes as the first forward did.

    For checkpoints that are not `te_dispatch.pytorch.checkpoint` or `torch.utils.checkpoint`, which need nothing. As in
    Transformer Engine, the first forwards of each module are recomputed in the order in which they ran.

    Args:
        activation_recompute: whether a checkpoint runs the function; False declares nothing.
        recompute_phase: False for the first forward, which runs without gradients; True for the one in the backward.
    """

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        self.activation_recompute = activation_recompute
        self.recompute_phase = recompute_phase
        self._before: list[tuple[bool, bool]] = []

    def __enter__(self) -> None:
        state = current_state()
        self._before.append((phase.declared, phase.recomputing))
        phase.declared = self.activation_recompute and state is not None and state.enabled
        phase.recomputing = self.recompute_phase

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        phase.declared, phase.recomputing = self._before.pop()


def get_activation_recompute_contexts() -> tuple[activation_recompute_forward, activation_recompute_forward]:
    """Contexts for a checkpoint's first forward and for its recomputation.

    Also what ``torch.utils.checkpoint.checkpoint(context_fn=...)`` takes, whose modules here need no such contexts.
    """
    return activation_recompute_forward(True, False), activation_recompute_forward(True, True)


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether FP8 modules called now belong to a checkpoint that `activation_recompute_forward` declares."""
    return phase.declared


def in_fp8_activation_recompute_phase() -> bool:
    """Whether `activation_recompute_forward` declares a recomputation."""
    return phase.recomputing
