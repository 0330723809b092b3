# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The only place where this backend uses names of Triton that Triton does not document, checked on Triton 3.5 and 3.6.

Each function says what it returns where a release of Triton looks otherwise: launches then go through Triton's own
path. ``backends/triton/tests/test_triton_private.py`` has a case for each, and checks that no other module uses them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton import knobs

_runtime = knobs.runtime

#: Parameters of the CUDA launcher of Triton 3.5 and 3.6.
_SHORT = ("self", "gridX", "gridY", "gridZ", "stream", "function", "args")

#: What the function closes over that Triton 3.5 and 3.6 put around the C launcher of a kernel with descriptors.
_CLOSED_OVER = {"launcher", "tensordesc_indices", "tensordesc_meta"}


@tl.core.builtin
def for_amd(_semantic: Any = None) -> tl.constexpr:
    """In a kernel: whether it is being compiled for AMD's chips, whatever device this machine has; False where Triton
    does not say."""
    options = getattr(getattr(_semantic, "builder", None), "options", None)
    return tl.constexpr(getattr(options, "backend_name", None) == "hip")


def hooked() -> bool:
    """Whether a hook of Triton's, or one of a chain of hooks, would be called at a launch."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return (enter is not None and bool(getattr(enter, "calls", True))) or (
        leave is not None and bool(getattr(leave, "calls", True))
    )


def launcher_of(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What launches a compiled kernel, and what it takes between the stream and the kernel's own arguments.

    Triton's launcher is a Python object around a C function, which it hands scratch memory that hardly any kernel has:
    where both look as in the release that this was measured with, the C function itself is returned.

    Args:
        compiled: a ``triton.compiler.CompiledKernel``.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    unhooked = (None, None, None)  # metadata for hooks, and those before and after the launch
    if (
        _parameters_of(run.__class__) == _SHORT
        and all(getattr(run, name, None) == 0 for name in ("global_scratch_size", "profile_scratch_size"))
        and hasattr(run, "launch_pdl")
    ):
        no_scratch = (None, None)
        return run.launch, (
            function, run.launch_cooperative_grid, run.launch_pdl, *no_scratch, metadata, *unhooked
        )  # fmt: skip
    return run, (function, metadata, *unhooked)


@functools.cache
def _parameters_of(launcher: type) -> tuple[str, ...]:
    return tuple(inspect.signature(launcher.__call__).parameters)


def descriptors_of(
    launch: Callable[..., None],
) -> tuple[Callable[..., None], Callable[[Any, Any], Any], list[tuple[int, Any]]] | None:
    """The parts of a launcher of a kernel that loads operands through descriptors.

    Returns:
        The launcher below it, which takes a tensor map's parts where there was a descriptor; the function (descriptor,
        meta) -> those parts; (place among the arguments, meta) of each descriptor, first to last. None for a launcher
        without descriptors, or one that looks otherwise.
    """
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    if set(names) != _CLOSED_OVER:
        return None
    cells = dict(zip(names, (cell.cell_contents for cell in launch.__closure__ or ())))  # type: ignore[attr-defined]
    module: dict[str, Any] = launch.__globals__  # type: ignore[attr-defined]
    make, first = module.get("make_tensordesc_arg"), module.get("_BASE_ARGS_FORMAT_LEN")
    described = [meta for meta in cells["tensordesc_meta"] if meta is not None]
    places = sorted(first + i for i in cells["tensordesc_indices"]) if isinstance(first, int) else []
    if make is None or not places or len(described) != len(places):
        return None
    return cells["launcher"], make, list(zip(places, described))


def ptx_version(release: str) -> int | None:
    """The PTX version that Triton writes for a release of NVIDIA's assembler: 88 for ``12.9``; None where it does not
    tell."""
    try:
        from triton.backends.nvidia.compiler import ptx_get_version
    except ImportError:
        return None
    return int(ptx_get_version(release))


def gluon_source(kernel: Any, signature: Any, constants: Any, attributes: Any) -> Any:
    """The source of a kernel in Gluon, as ``triton.compile`` takes it; of one in Triton it is
    ``triton.compiler.ASTSource``.

    Raises:
        ImportError: this release has no Gluon.
    """
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource(kernel, signature, constants, attributes)
