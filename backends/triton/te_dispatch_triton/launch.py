# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Launching a kernel: what Triton's own argument path does, done once per kind of call.

A `Kernel` wraps a ``@triton.jit`` function whose parameters stand in two groups: run-time ones, then ``tl.constexpr``
ones. A call gives the first as a tuple (tensors, None for an absent one, numbers) and the second as a tuple too, with a
`Config`. The first call of a kind goes through Triton, which compiles or finds it in its cache; later calls hand raw
addresses to the compiled launcher. A kind is what Triton specializes on: types, alignment to 16, integers that are 1
or wider than 32 bits.

Where tiles are loaded by hardware (TMA), an operand is passed as a `Descriptor`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton

from te_dispatch.backend_kit.device import current_device, raw_stream
from te_dispatch.core.errors import CaptureError
from te_dispatch_triton import assembler, miscompiled
from te_dispatch_triton.descriptor import Descriptor as Descriptor
from te_dispatch_triton.descriptor import mapped
from te_dispatch_triton.kinds import READERS, reader_of
from te_dispatch_triton.tape import ACTIVE, active
from te_dispatch_triton.targets import INTERPRETER, target_of
from te_dispatch_triton.triton_private import hooked, launcher_of

Grid = tuple[int, int, int]
#: What every chip allows one program: 1,024 threads, in warps of 32 or, on AMD's data center chips, 64.
_MAX_WARPS = 16


class Config(NamedTuple):
    """How a kernel is compiled, beside its constants. `fp_fusion`: products and sums may become one rounding."""

    num_warps: int = 4
    num_stages: int = 2
    fp_fusion: bool = False
    #: Further options of Triton's compilers, as (name, value): ``(("waves_per_eu", 2),)``.
    options: tuple[tuple[str, Any], ...] = ()


class Launch(NamedTuple):
    """One call, as `recording` keeps it."""

    kernel: Kernel
    grid: Grid
    args: tuple[Any, ...]
    constants: tuple[Any, ...]
    config: Config
    device: torch.device


class CompileFailure(RuntimeError):
    """A kernel did not compile, or its binary does not fit the chip. Names kernel, target and configuration."""


#: Triton's interpreter replaces functions of `triton.language` while a kernel runs: one thread at a time.
_interpreter = threading.Lock()
_recorder: Callable[[Launch], None] | None = None
#: What replays of a recorded call run in place of a launch; None where they are not to be replayed.
_replayer: Callable[[Launch], Callable[..., None]] | None = None
_raw_stream, _current = raw_stream, current_device


class Kernel:
    """A jitted function with the launchers of what it was compiled to.

    Args:
        function: what ``@triton.jit`` made.
    """

    __slots__ = ("function", "name", "_compiled", "_replaced")

    def __init__(self, function: Any) -> None:
        self.function = function
        self.name: str = function.__name__
        self._compiled: dict[tuple[Any, ...], Any] = {}
        #: By the key of `_compiled`: configurations in place of the call's, which is miscompiled.
        self._replaced: dict[tuple[Any, ...], Config] = {}

    def __repr__(self) -> str:
        return f"Kernel({self.name})"

    def __call__(
        self, device: torch.device, grid: Grid, args: tuple[Any, ...], constants: tuple[Any, ...], config: Config
    ) -> None:
        """Launch on the current stream of a device.

        Args:
            grid: programs along three axes, each at least 1.
            args: tensors of that device, descriptors of them, None, ints and floats; tuples of ints that Triton
                specializes alike.
        """
        index = device.index
        if _recorder is not None or index is None:
            self._launch_slowly(device, grid, args, constants, config)
            return None
        classes = tuple(map(type, args))
        read = READERS.get(classes)
        if read is None:
            read = READERS[classes] = reader_of(classes)
        facts, values = read(*args)
        key = (index, config, constants, read, facts)
        compiled = self._compiled.get(key)
        if compiled is None:
            checked = self._checked_config(device, grid, args, constants, config)
            compiled = self._compiled[key] = self._compile(device, grid, args, constants, checked)
            if checked != config:
                self._replaced[key] = checked
            if ACTIVE:
                _note(compiled, grid, args, constants)
            return None
        if observed():
            # Profilers want to be told what only Triton's own path tells.
            self._launch_slowly(device, grid, args, constants, self._replaced.get(key, config))
            return None
        if ACTIVE:
            _note(compiled, grid, args, constants)
        run, given = compiled
        if index == _current():
            run(grid[0], grid[1], grid[2], _raw_stream(index), *given, *values, *constants)
        else:
            with torch.cuda.device(index):
                run(grid[0], grid[1], grid[2], _raw_stream(index), *given, *values, *constants)
        return None

    def _checked_config(
        self, device: torch.device, grid: Grid, args: tuple[Any, ...], constants: tuple[Any, ...], config: Config
    ) -> Config:
        """Compile without launching, and return the configuration to launch with.

        It is the given one unless the binary shows a known compiler defect (`miscompiled`). Then twice and half the
        warps are tried: they change the layout of tensors in registers, which the defect of `lanes` depends on.

        Raises:
            CaptureError: a CUDA graph is being captured, which compiling would break.
            CompileFailure: it does not compile, or is miscompiled with each of them; names kernel, chip and
                configuration.
        """
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"Triton kernel {self.name} is not compiled for this kind of call yet, and a CUDA graph is being "
                "captured: make the same call once before the capture"
            )
        warps = config.num_warps
        others = () if self.function.is_gluon() else (2 * warps, warps // 2)
        defects: list[str] = []
        with self._naming(device, constants, config):
            for number in (warps, *(n for n in others if 1 <= n <= _MAX_WARPS)):
                tried = config._replace(num_warps=number)
                compiled = self._through_triton(device, grid, args, constants, tried, compile_only=True)
                defect = miscompiled.found(compiled.asm)
                if defect is None:
                    return tried
                defects.append(defect)
            raise RuntimeError(
                f"Triton {triton.__version__} miscompiles it ({defects[0]}): another release of Triton may not; else "
                "avoid this implementation by a policy"
            )

    def _compile(
        self, device: torch.device, grid: Grid, args: tuple[Any, ...], constants: tuple[Any, ...], config: Config
    ) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """Launch for the first time; returns what later calls of the kind need.

        Raises:
            CompileFailure: the binary does not fit the chip; names kernel, chip and configuration.
        """
        with self._naming(device, constants, config):
            launcher, fixed = launcher_of(self._launch_slowly(device, grid, args, constants, config))
            return mapped(launcher), fixed

    @contextmanager
    def _naming(self, device: torch.device, constants: tuple[Any, ...], config: Config) -> Iterator[None]:
        """Errors become a CompileFailure that names kernel, chip and configuration."""
        try:
            yield
        except Exception as error:
            raise CompileFailure(
                f"Triton kernel {self.name} for {target_of(device).arch} with {describe(self, constants, config)}: "
                f"{reason_of(error)}"
            ) from error

    def _launch_slowly(
        self, device: torch.device, grid: Grid, args: tuple[Any, ...], constants: tuple[Any, ...], config: Config
    ) -> Any:
        """Record the launch, interpret the kernel, or go through Triton's own path and return what it compiled."""
        if _recorder is not None:
            return self._divert(_recorder, Launch(self, grid, args, constants, config, device))
        if target_of(device) is INTERPRETER:
            with _interpreter:
                return self.function[grid](*args, *constants)
        return self._through_triton(device, grid, args, constants, config, compile_only=False)

    def _through_triton(
        self, device: torch.device, grid: Grid, args: tuple[Any, ...], constants: tuple[Any, ...], config: Config,
        *, compile_only: bool,
    ) -> Any:  # fmt: skip
        """Triton's own path: compile, or take from its cache, and launch unless `compile_only`; what it compiled."""
        given = [x.of_triton(self.function.is_gluon()) if x.__class__ is Descriptor else x for x in args]
        target = target_of(device)
        with torch.cuda.device(device), assembler.chosen(target.backend, target.triton_arch) as more:
            return self.function.run(*given, *constants, grid=grid, warmup=compile_only, **options_of(config), **more)

    def _divert(self, recorder: Callable[[Launch], None], given: Launch) -> None:
        tape = active()
        if _replayer is None or tape is None:
            recorder(given)
            return
        with tape.aside():
            recorder(given)
        tape.launched(_replayer(given), (), given.grid, given.args, given.constants)


def _note(
    compiled: tuple[Callable[..., None], tuple[Any, ...]], grid: Grid, args: tuple[Any, ...], constants: tuple[Any, ...]
) -> None:
    """Record a launch where this thread's call is."""
    tape = active()
    if tape is not None:
        tape.launched(*compiled, grid, args, constants)


def recorded() -> bool:
    """Whether launches are noted instead of done."""
    return _recorder is not None


def observed() -> bool:
    """Whether launches are recorded and not to be replayed, or a hook of Triton's (or one of a chain of hooks) would be
    called at one."""
    return (_recorder is not None and _replayer is None) or hooked()


def reason_of(error: BaseException) -> str:
    """An error of Triton's compiler with what led to it: the innermost says what is wrong, the outermost where."""
    told = [f"{type(error).__name__}: {error}"]
    while error.__cause__ is not None:
        error = error.__cause__
        told.append(f"{type(error).__name__}: {error}")
    return "\n".join(told)


def options_of(config: Config) -> dict[str, Any]:
    """A configuration as Triton's compilers take it."""
    return {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": config.fp_fusion,
        **dict(config.options),
    }


def describe(kernel: Kernel, constants: tuple[Any, ...], config: Config) -> str:
    """A configuration for readers: ``BLOCK=128, num_warps=4, ...``."""
    names = constant_names(kernel)
    shown = {**dict(zip(names, constants)), **options_of(config)}
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def constant_names(kernel: Kernel) -> list[str]:
    """The names of a kernel's ``tl.constexpr`` parameters, which are its last."""
    return [p.name for p in kernel.function.params if p.is_constexpr]


@contextmanager
def recording(into: list[Launch]) -> Iterator[None]:
    """Launches are noted instead of done; results are then uninitialized."""
    with diverted(into.append):
        yield


@contextmanager
def diverted(
    to: Callable[[Launch], None], replayer: Callable[[Launch], Callable[..., None]] | None = None
) -> Iterator[None]:
    """Launches are given to a function, in order, instead of being done.

    Args:
        replayer: of a launch, what does such launches in replays of recorded calls: it is called as Triton's launcher
            is (three sizes of the grid, stream, arguments with addresses for tensors, constants). By default calls are
            not recorded.
    """
    global _recorder, _replayer
    previous = _recorder, _replayer
    _recorder, _replayer = to, replayer
    try:
        yield
    finally:
        _recorder, _replayer = previous


def blocks(size: int, block: int) -> int:
    """Programs that cover a size."""
    return -(-size // block)
