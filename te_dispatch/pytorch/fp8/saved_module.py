# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Modules with ``_extra_state`` in their state_dict."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from te_dispatch.pytorch.fp8.delayed_scales import StateError
from te_dispatch.pytorch.fp8.empty_entry import EmptyEntry, received

_log = logging.getLogger("te_dispatch")


class SavedModule(torch.nn.Module):
    """A module with ``_extra_state`` in its state_dict, as Transformer Engine's modules have; here an empty one.

    Checkpoints without it load: those of `torch.nn` modules, and of high-precision training.
    """

    #: A key under which an earlier release of Transformer Engine saved the entry, after the module's prefix.
    FORMER_ENTRY: ClassVar[str | None] = None

    def get_extra_state(self) -> torch.Tensor:
        """Nothing, as an empty tensor of bytes (`te_dispatch.pytorch.fp8.empty_entry`)."""
        return EmptyEntry()

    def set_extra_state(self, state: Any) -> None:
        """Take what `get_extra_state` gives; warn of what Transformer Engine saves for FP8 attention."""
        state = received(state)
        tensor = isinstance(state, torch.Tensor) and state.numel()
        if tensor or (isinstance(state, io.BytesIO) and state.getbuffer().nbytes):
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
        former = None if self.FORMER_ENTRY is None else f"{prefix}{self.FORMER_ENTRY}"
        try:
            if former in state_dict:
                self.set_extra_state(state_dict[former])  # first: an entry of today's key is what holds
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        except StateError as error:
            error_msgs.append(f"{key}: {error}")
        if key in missing_keys:
            missing_keys.remove(key)
        if former in unexpected_keys:
            unexpected_keys.remove(former)


def has_te_modules(network: Any) -> bool:
    """Whether a module is, or has in it, one of this package's that computes; True for anything but a module, which
    cannot be looked into."""
    if not isinstance(network, torch.nn.Module):
        return True
    return any(isinstance(part, SavedModule) for part in network.modules())
