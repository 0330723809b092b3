# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Global state that a call must leave as it found it: random generators, threads, floating-point modes, PyTorch flags.

Each setting has a reader and, where it can be put back, a writer. What a call changed is put back at once, so that it
fails the unit that made the call and none after it.
"""

from __future__ import annotations

import gc
import logging
import operator
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from te_dispatch.torch_private import (
    dispatch_modes,
    function_modes,
    multithreading,
    pop_saved_tensors_hooks,
    print_options,
    saved_tensors_hooks,
)


@dataclass(frozen=True)
class Setting:
    """One piece of global state.

    Attributes:
        name: in words, for messages.
        read: its value now; values are compared with ``==``, tensors by their elements.
        write: puts a value back; None where nothing can.
        shown: whether the values mean something to a reader of the message.
        imported: whether modules that a call imports may change it.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any] | None = None
    shown: bool = True
    imported: bool = False


#: Halved in the calling thread's floating-point mode, which shows whether subnormals are flushed. Not constants of an
#: expression, which Python would compute when it compiles this module.
_SMALLEST_NORMAL = sys.float_info.min
_BELOW_HALF, _ABOVE_HALF = 2.0**-54, 3 * 2.0**-54


def _keeps_subnormals() -> bool:
    return _SMALLEST_NORMAL * 0.5 > 0.0


def _rounds_to_nearest() -> bool:
    return 1.0 + _BELOW_HALF == 1.0 and 1.0 + _ABOVE_HALF > 1.0


def _common() -> tuple[Setting, ...]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    blas = torch.backends.cuda.preferred_blas_library
    return (
        Setting("PyTorch's random generator of the CPU", torch.get_rng_state, torch.set_rng_state, shown=False),
        Setting("Python's random generator", random.getstate, random.setstate, shown=False),
        Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
        Setting(
            "whether subnormal numbers are kept", _keeps_subnormals, lambda kept: torch.set_flush_denormal(not kept)
        ),
        Setting("whether the CPU rounds to nearest", _rounds_to_nearest),
        Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Setting("the default device", _default_device, _set_default_device),
        Setting("whether gradients are recorded", torch.is_grad_enabled, torch.set_grad_enabled),
        Setting("inference mode", torch.is_inference_mode_enabled),
        Setting("autocast", _autocast, _set_autocast),
        Setting("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        Setting("hooks on what autograd saves", lambda: saved_tensors_hooks(True), _take_hooks_away, False),
        Setting("threads of backward passes", multithreading, torch.autograd.set_multithreading_enabled),
        Setting("modes that were entered", _modes),
        Setting("the preferred BLAS library", blas, blas),  # which reads it where it gets no argument
        *(
            Setting(f"torch.backends.cuda.{name}_sdp_enabled", *_attention(name))
            for name in ("flash", "mem_efficient", "math", "cudnn")
        ),
        *(
            (Setting("the CPUs that the thread may run on", lambda: os.sched_getaffinity(0), _set_affinity),)
            if hasattr(os, "sched_getaffinity")
            else ()
        ),
        Setting("how often Python switches threads", sys.getswitchinterval, sys.setswitchinterval),
        Setting("Python's garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        Setting("the working directory", os.getcwd, os.chdir),
        Setting("the environment's variables", lambda: dict(os.environ), _set_environment, False, imported=True),
        Setting("the filters of warnings", lambda: list(warnings.filters), _set_filters, False, imported=True),
        *(() if print_options is None else (Setting("how PyTorch prints numbers", _printed, _set_printed),)),
        Setting("functions of PyTorch", _Functions, _Functions.put_back, False, imported=True),
        Setting("Python's logging", _logging, _set_logging, False),
        Setting("handlers of signals", _handlers),
        Setting("whether PyTorch repeats warnings", torch.is_warn_always_enabled, torch.set_warn_always),
        Setting("Python's recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
        Setting("whether uninitialized memory is filled", *attribute(torch.utils.deterministic, _FILLED)),
        Setting("the deterministic mode", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        Setting(
            "the precision of float32 products",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        *(
            Setting(f"torch.backends.{where}.{name}", *attribute(owner, name))
            for where, owner, names in (
                ("cuda.matmul", matmul, ("allow_tf32", "allow_fp16_reduced_precision_reduction",
                                         "allow_bf16_reduced_precision_reduction")),
                ("cudnn", cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
                ("mkldnn", torch.backends.mkldnn, ("enabled", "deterministic")),
            )
            for name in names
        ),
    )  # fmt: skip


def _printed() -> tuple[Any, ...]:
    return tuple(vars(print_options).values())


def _set_printed(values: tuple[Any, ...]) -> None:
    for name, value in zip(vars(print_options), values):
        setattr(print_options, name, value)


class _Functions:
    """What the names of functions stand for, compared by identity."""

    def __init__(self) -> None:
        self.found = [value for owner, names in _OWNED for value in operator.itemgetter(*names)(vars(owner))]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Functions) and all(map(operator.is_, self.found, other.found))

    __hash__ = None  # type: ignore[assignment]

    def put_back(self) -> None:
        names = [(owner, name) for owner, names in _OWNED for name in names]
        for (owner, name), function in zip(names, self.found, strict=True):
            if vars(owner)[name] is not function:
                setattr(owner, name, function)


def _names_of_functions(owner: Any) -> list[str]:
    return [name for name, value in vars(owner).items() if callable(value)]


#: Owners of PyTorch's functions, with their names.
_OWNED: list[tuple[Any, list[str]]] = [
    (owner, _names_of_functions(owner)) for owner in (torch, torch.Tensor, torch.nn.functional)
]


def _logging() -> tuple[Any, ...]:
    """Level and handlers of the logger that all others hand on to, and what is disabled of all."""
    root = logging.getLogger()
    return root.level, tuple(root.handlers), logging.root.manager.disable


def _set_logging(state: tuple[Any, ...]) -> None:
    root = logging.getLogger()
    level, handlers, disabled = state
    root.setLevel(level)
    root.handlers[:] = handlers
    logging.disable(disabled)


def _set_affinity(cpus: set[int]) -> None:
    os.sched_setaffinity(0, cpus)


def _modes() -> tuple[int, int]:
    """How many modes of ``__torch_dispatch__`` and ``__torch_function__`` are entered."""
    return dispatch_modes(), function_modes()


def _attention(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Reader and writer of a switch of PyTorch's attention."""
    return getattr(torch.backends.cuda, f"{name}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{name}_sdp")


def _take_hooks_away(before: Any) -> None:
    """Until the innermost hooks are those that were there before."""
    for _ in range(_HOOKS):
        if saved_tensors_hooks(True) == before:
            return
        pop_saved_tensors_hooks()


def _default_device() -> torch.device:
    return torch.get_default_device()


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _autocast() -> tuple[Any, ...]:
    return (
        *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
        *(torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")),
        torch.is_autocast_cache_enabled(),
    )


def _set_autocast(values: tuple[Any, ...]) -> None:
    for kind, enabled, dtype in zip(("cpu", "cuda"), values[:2], values[2:4]):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(values[4])


def attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Reader and writer of an attribute."""
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


def _set_environment(values: Mapping[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


def _set_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]


#: Hooks on saved tensors that one call may leave.
_HOOKS = 64
#: Signals that programs and their test frameworks handle.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD") if hasattr(signal, name))
_FILLED = "fill_uninitialized_memory"


def _handlers() -> tuple[Any, ...]:
    return tuple(map(signal.getsignal, _SIGNALS))


def _numpy() -> tuple[Setting, ...]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return ()
    return (
        Setting("NumPy's random generator", lambda: _numpy_state(numpy), numpy.random.set_state, shown=False),
        Setting("NumPy's handling of floating-point errors", numpy.geterr, lambda modes: numpy.seterr(**modes)),
    )


def _numpy_state(numpy: Any) -> tuple[Any, ...]:
    kind, keys, *rest = numpy.random.get_state()
    return (kind, torch.from_numpy(keys.copy()), *rest)


def _on(device: torch.device) -> tuple[Setting, ...]:
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return ()
    return (
        Setting(
            f"PyTorch's random generator of {device}",
            lambda: torch.cuda.get_rng_state(device),
            lambda state: torch.cuda.set_rng_state(state, device),
            shown=False,
        ),
        Setting("the current device", torch.cuda.current_device, torch.cuda.set_device),
        Setting("the current stream", lambda: torch.cuda.current_stream(device), torch.cuda.set_stream),
    )


class World:
    """The settings as they are when this is made.

    Args:
        device: whose generator and stream are among them.
    """

    def __init__(self, device: torch.device) -> None:
        self._settings = (*_shared(), *_numpy(), *_on(device))
        self._modules = len(sys.modules)  # first: reading a setting may import something
        self._values = tuple(setting.read() for setting in self._settings)

    def changes(self) -> list[str]:
        """What has changed since, in words. All that can be put back is put back."""
        found = []
        imported = len(sys.modules) != self._modules
        for setting, before in zip(self._settings, self._values):
            now = setting.read()
            if not _equal(before, now) and not (imported and setting.imported):
                found.append(f"{setting.name}: was {before}, is {now}" if setting.shown else setting.name)
                if setting.write is not None:
                    setting.write(before)
        return found


_made: list[tuple[Setting, ...]] = []


def _shared() -> tuple[Setting, ...]:
    if not _made:
        settings = _common()
        for setting in settings:
            setting.read()
        _made.append(settings)
    return _made[0]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other))
    return bool(one == other)
