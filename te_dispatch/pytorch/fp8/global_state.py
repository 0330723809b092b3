# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`FP8GlobalStateManager`: what Transformer Engine's users ask of the autocast in force.

A view: the state is that of `te_dispatch.pytorch.autocast` and of the modules.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import torch

from te_dispatch.common.recipe import Recipe
from te_dispatch.pytorch.fp8 import scale_update
from te_dispatch.pytorch.fp8.autocast import AutocastState, autocast, current_state, get_default_recipe, thread
from te_dispatch.pytorch.fp8.support import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
)

_log = logging.getLogger("te_dispatch")

#: Not empty once a warning has been given.
_warned: list[bool] = []

#: What to use instead of what is not here.
_INSTEAD = {
    **dict.fromkeys(
        (
            "copy_forward_fp8_meta_tensors_for_recompute",
            "get_old_fp8_meta_tensors_for_recompute",
            "restore_fp8_meta_tensors",
        ),
        "checkpoints keep scales by themselves; those of other programs declare their phases with "
        "te_dispatch.pytorch.recompute.phases.activation_recompute_forward",
    ),
    "quantization_state": "the methods of FP8GlobalStateManager say what is in force, and the modules hold the rest",
}


class _Manager(type):
    def __getattr__(cls, name: str) -> Any:
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"FP8GlobalStateManager has no {name!r}{instead}", name=name, obj=cls)


class _Entered(threading.local):
    def __init__(self) -> None:
        #: What `autocast_enter` entered and `autocast_exit` has not left.
        self.regions: list[autocast] = []


_entered = _Entered()


class FP8GlobalStateManager(metaclass=_Manager):
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
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        """Enter `te_dispatch.pytorch.autocast` of these arguments, which `autocast_exit` leaves."""
        region = autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
        region.__enter__()
        _entered.regions.append(region)

    @classmethod
    def autocast_exit(cls, enabled: bool, _graph: bool) -> None:
        """Leave what the last `autocast_enter` entered; leaving the outermost updates forward scales as it does.

        Args:
            enabled, _graph: those of `autocast_enter`, which count.

        Raises:
            RuntimeError: nothing was entered by it.
        """
        if not _entered.regions:
            raise RuntimeError("FP8GlobalStateManager.autocast_exit: no autocast_enter is open in this thread")
        _entered.regions.pop().__exit__(None, None, None)

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True for the first who asks inside of an outermost autocast, False for those who ask after."""
        first = thread.unasked and thread.state is not None
        thread.unasked = False
        return first

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Update the scales of delayed scaling of the modules that this thread trains, as the end of an autocast does.

        For programs that replay CUDA graphs of modules, whose casts record amaxes that nothing else sees.
        `make_graphed_callables` needs no such call.

        Args:
            forward: whether those of inputs and weights, else those of gradients.
        """
        scale_update.trainer().update(forward, every=True)

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: torch.Tensor, group: Any) -> None:
        """Write the largest elements over the ranks of a process group, where torch.distributed is initialized."""
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: Mapping[str, Any]) -> None:
        """Nothing: the states of a module, whose `fp8_meta` this is, take part in every update from their first use on.

        Raises:
            TypeError: another mapping with states in it, which nothing here would update.
        """
        states = sorted({"scaling_fwd", "scaling_bwd"} & set(fp8_meta))
        if states:
            raise TypeError(
                "add_fp8_tensors_to_global_buffer: fp8_meta must be that of a module of te_dispatch.pytorch, got a "
                f"{type(fp8_meta).__name__} with {' and '.join(states)}, whose scales nothing here updates"
            )

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Nothing: a captured graph that quantizes weights does so in every replay. The values are the same while the
        weights are; True, which would spare these casts, is warned of once."""
        if skip and not _warned:
            _warned.append(True)
            _log.warning(
                "set_skip_fp8_weight_update_tensor(True) spares no casts of weights: captured graphs run them in every "
                "replay; make_graphed_callables(.., cache_quantized_params=True) keeps quantized weights"
            )

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> None:
        """None: no tensor says so here, `set_skip_fp8_weight_update_tensor`."""

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        """``forward`` or ``backward``."""
        return "forward" if forward else "backward"

    @classmethod
    def get_buffer_info(cls) -> str:
        """The key of a module's place in Transformer Engine's buffers, in its `fp8_meta`; there is none here."""
        return "buffer_index_and_autocast_key"

    @staticmethod
    def get_unique_autocast_key(recipe: Recipe | None = None, group: Any = None) -> str:
        """A string that tells autocasts of different recipes or process groups apart, in this process."""
        return f"recipe={recipe},group={None if group is None else id(group)}"

    @classmethod
    def get_key_in_buffer(cls, forward: bool, fp8_recipe: Recipe, fp8_group: Any) -> str:
        """A string that tells directions and autocasts apart: `get_fwd_bwd_key`, ``_``, `get_unique_autocast_key`."""
        return f"{cls.get_fwd_bwd_key(forward)}_{cls.get_unique_autocast_key(fp8_recipe, fp8_group)}"

    @classmethod
    def split_key_in_buffer(cls, key: str) -> tuple[bool, str]:
        """The parts of `get_key_in_buffer`: whether of the forward, and the autocast's."""
        direction, _, autocast_key = key.partition("_")
        return direction == "forward", autocast_key

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
        thread.state, thread.traced, thread.unasked = None, None, False
        _entered.regions.clear()
        for group in scale_update.trainer().groups:
            group.dirty = False
