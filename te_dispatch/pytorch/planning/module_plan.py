# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`plan`: every decision of a module's forward and backward, from shapes alone.

A copy of the module runs on tensors without data (`fake_modules`) under bindings that decide calls without making them
(`te_dispatch.core.planning`). So the arithmetic is written once, in the modules, and a plan follows from it. Around the
run, what belongs to this thread is replaced by something of the plan's own: the autocast, and who updates scales.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from te_dispatch.common.recipe import Recipe
from te_dispatch.core import scopes
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.module_plan import BACKWARD, ModulePlan
from te_dispatch.core.planning import Planner, PlanningBindings
from te_dispatch.core.watched import reload_changed
from te_dispatch.ops.results import as_returned
from te_dispatch.pytorch.arguments import resolve_device
from te_dispatch.pytorch.fp8 import scale_update
from te_dispatch.pytorch.fp8.autocast import AutocastState, autocast, current_state, restored, thread
from te_dispatch.pytorch.planning.fake_modules import Fakes, PlanningError, TensorSpec
from te_dispatch.torch_private import DataDependent, FakeTensorMode


def plan(
    module: torch.nn.Module,
    *tensor_specs: Any,
    recipe: Recipe | None = None,
    device: str | torch.device | DeviceFacts | None = None,
    backward: bool = True,
    **kwargs: Any,
) -> ModulePlan:
    """Every operator call of a module's forward and backward, with what would serve it and why the others would not.

    No kernel runs, and nothing changes: parameters and gradients, delayed-scaling state, quantized weights that are
    kept, what modules and operators remember of calls, random states, warnings. The policy in force holds, and so does
    torch.autocast.

    Args:
        module: one of `te_dispatch.pytorch`, or one that contains such. Parameters may be on the meta device.
        tensor_specs: the forward's positional arguments: tensors, of which shape, strides, dtype and `requires_grad`
            count, `TensorSpec`, and whatever else the forward takes.
        recipe: of an `autocast` around the forward; None for the autocast in force, or high precision outside any.
        device: what to plan for; None for the device of the parameters. ``vendor:arch`` (``nvidia:sm_90``), here or
            not; a device of this machine; or `DeviceFacts`. What cannot be known of a device elsewhere is assumed to
            suit, as in ``te-dispatch explain``.
        backward: False plans a forward under ``torch.no_grad()``, with no backward to come.
        kwargs: the forward's; tensors in them may be `TensorSpec`.

    Returns:
        The calls in order. Where nothing serves one, it is among `ModulePlan.unserved`.

    Raises:
        PlanningError: the forward depends on values of tensors, or the module cannot be copied.
        DispatchError: an unknown device. TypeError: `module` is no module. And what the forward raises for arguments
            that it does not take.

    An implementation that declines a call when it is made cannot be foreseen; one that has declined such a call before
    in this process is taken into account. Weights that an earlier call keeps quantized (`is_first_microbatch`) are not:
    with False they are cast as with True. Code of one's own, hooks too, runs with tensors without data;
    modules that it calls must be parts of `module`, which alone is copied.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"plan: module must be a torch.nn.Module, got {type(module).__name__}")
    manager = scopes.MANAGER
    reload_changed(manager)
    home = _home(module)
    planned_for = _device(device)
    planner = Planner(scopes.capture(), planned_for, as_returned)
    region = functools.partial(_region, recipe, current_state())
    told = _run(module, planner, home, tensor_specs, kwargs, region, backward)
    return ModulePlan(
        module=type(module).__name__,
        device=planned_for or manager.device_facts(home),
        recipe=told,
        calls=tuple(planner.calls),
        assumed=tuple(planner.assumed),
    )


def _run(
    module: torch.nn.Module,
    planner: Planner,
    home: torch.device,
    specs: tuple[Any, ...],
    kwargs: dict[str, Any],
    region: Callable[[], contextlib.AbstractContextManager[Any]],
    backward: bool,
) -> str | None:
    """Have a planner note the calls of a module's step; the recipe in words."""
    with _apart(home, backward), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = Fakes(mode, home)
        copy = fakes.module(module)
        args, named = fakes.value(specs), fakes.value(kwargs)
        _tell_sites(copy)
        with scopes.reenter(planner.root), _refusing(module, planner):
            with region():
                told = _told(current_state())
                out = copy(*args, **named)
            planner.phase = BACKWARD
            _run_backward(out)
    return told


def _device(device: str | torch.device | DeviceFacts | None) -> DeviceFacts | None:
    if device is None or isinstance(device, DeviceFacts):
        return device
    if isinstance(device, torch.device):
        return scopes.MANAGER.device_facts(device)
    if not isinstance(device, str):
        raise TypeError(f"plan: device must be a str, a torch.device, DeviceFacts or None, got {device!r}")
    return scopes.MANAGER.devices.named(device)


def _home(module: torch.nn.Module) -> torch.device:
    """Where the module computes: what is on the meta device would be made on the current one.

    A described device has no tensors here, fake ones neither: autograd asks the backend of a tensor's device for
    streams, and ends the process where PyTorch was built without it.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            return tensor.device
    return resolve_device(None)


@contextlib.contextmanager
def _apart(home: torch.device, backward: bool) -> Iterator[None]:
    """Keep what belongs to this thread and this process as it is."""
    states = thread.states
    accelerators = [] if home.type == "cpu" else [home]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(accelerators, device_type=home.type))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(backward))
        # Those that the step would give are left for it to give.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # Outside of every autocast, so that the plan's own is the outermost, at whose end scales update.
        stack.enter_context(restored(None))
        stack.enter_context(scale_update.apart())
        stack.callback(setattr, thread, "states", states)
        thread.states = dict(states)
        yield


def _region(recipe: Recipe | None, state: AutocastState | None) -> contextlib.AbstractContextManager[Any]:
    """The autocast around the forward: with the recipe, or the one in force again."""
    if recipe is not None:
        return autocast(recipe=recipe)
    if state is None:
        return contextlib.nullcontext()
    return autocast(state.enabled, state.calibrating, state.recipe, state.process_group)


def _told(state: AutocastState | None) -> str | None:
    """The recipe in words: its class, and what differs from the defaults."""
    if state is None or not state.enabled:
        return None
    recipe, chosen = state.recipe, []
    for field in dataclasses.fields(recipe):
        value, made = getattr(recipe, field.name), field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        if field.init and value != default:
            chosen.append(f"{field.name}={value!r}")
    return f"{type(recipe).__name__}({', '.join(chosen)})" if chosen else type(recipe).__name__


def _tell_sites(module: torch.nn.Module) -> None:
    """Have every module's forward run under the bindings of its own call site."""
    for name, part in module.named_modules():
        compiled = getattr(part, "_orig_mod", None)  # torch.compile's wrapper: planned is what it wraps
        forward = compiled if isinstance(compiled, torch.nn.Module) else part.forward
        part.__dict__["forward"] = _at(name, forward)


def _at(site: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def located(*args: Any, **kwargs: Any) -> Any:
        bindings = scopes.capture()
        if not isinstance(bindings, PlanningBindings):  # user's code left the plan's scope for another
            raise PlanningError(f"{site or 'the module'} runs under bindings that were captured outside of the plan")
        with scopes.reenter(bindings.at(site)):
            return forward(*args, **kwargs)

    return located


def _run_backward(out: Any) -> None:
    """The backward of everything in a result that has one, from gradients that look like it."""
    outputs = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor) and one.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.empty_like(one) for one in outputs])


@contextlib.contextmanager
def _refusing(module: torch.nn.Module, planner: Planner) -> Iterator[None]:
    """Say what a data-dependent step means for a plan."""
    try:
        yield
    except DataDependent as error:
        last = f" after {planner.calls[-1]}" if planner.calls else ""
        raise PlanningError(
            f"{type(module).__name__} cannot be planned: its {planner.phase} reads values of a tensor{last} ({error}). "
            "A plan has shapes only: give such values as arguments (max_seqlen_q for cumulative lengths), or plan the "
            "parts of the module between those steps"
        ) from error


__all__ = ["ModulePlan", "PlanningError", "TensorSpec", "plan"]
