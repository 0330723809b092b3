# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`FP8GlobalStateManager`: what Transformer Engine's users ask of the autocast in force.

A view: the state is that of `te_dispatch.pytorch.autocast` and of the modules.
"""

from __future__ import annotations

from typing import Any

from te_dispatch.common.recipe import Recipe
from te_dispatch.pytorch.fp8 import scale_update
from te_dispatch.pytorch.fp8.autocast import AutocastState, current_state, get_default_recipe, thread
from te_dispatch.pytorch.fp8.support import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
)


class FP8GlobalStateManager:
    """The autocast in force in this thread, as class methods."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether modules called now would quantize."""
        state = current_state()
        return state is not None and state.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether modules called now would record amaxes; also true where they quantize as well, if both were asked."""
        state = current_state()
        return state is not None and state.calibrating

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe in force; outside any autocast, that of an autocast without one."""
        state = current_state()
        return get_default_recipe() if state is None else state.recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The process group over which amaxes are reduced; None for the default group."""
        state = current_state()
        return None if state is None else state.process_group

    @classmethod
    def get_autocast_state(cls) -> AutocastState | None:
        """The autocast in force, for `set_autocast_state`."""
        return current_state()

    @classmethod
    def set_autocast_state(cls, state: AutocastState | None) -> None:
        """Be in the autocast that a state came from, until the enclosing one ends.

        Raises:
            TypeError: `state` did not come from `get_autocast_state`.
        """
        if state is not None and not isinstance(state, AutocastState):
            raise TypeError(f"set_autocast_state: state must come from get_autocast_state(), got {state!r}")
        thread.state = state

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules made now hold quantized parameters: never, they hold high-precision ones."""
        return False

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether quantized parameters keep the values they were made from: there are none."""
        return False

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether an autocast with ``_graph=True`` is in force."""
        state = current_state()
        return state is not None and state.graph

    @classmethod
    def get_meta_tensor_key(cls, forward: bool = True) -> str:
        """The name of a direction's state in `get_fp8_meta_tensors` and in `quantizers` of a module."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """`check_fp8_support`."""
        return check_fp8_support()

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        """`check_mxfp8_support`."""
        return check_mxfp8_support()

    @classmethod
    def is_fp8_block_scaling_available(cls) -> tuple[bool, str]:
        """`check_fp8_block_scaling_support`."""
        return check_fp8_block_scaling_support()

    @classmethod
    def is_nvfp4_available(cls) -> tuple[bool, str]:
        """`check_nvfp4_support`."""
        return check_nvfp4_support()

    @classmethod
    def reset(cls) -> None:
        """Leave every autocast of this thread, and drop updates of scales that are due. The scales are the modules'."""
        thread.state, thread.traced = None, None
        for group in scale_update.trainer().groups:
            group.dirty = False
