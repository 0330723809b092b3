# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which of NVIDIA's assemblers (ptxas) makes a kernel's binary.

Triton 3.6 gives chips before Blackwell to 12.8.93, which makes wrong binaries of some kernels. Two ways are known, both
read in its output:

- of a loop with a matrix product whose tiles of one operand lie where those of another did, it moves what the addresses
  have in common out of the loop and leaves the base behind: uniform registers are read that nothing wrote. Attention
  over operands that are loaded one 16-bit element at a time (head dimensions or addresses that are no multiple of 16
  bytes) then multiplies by whatever lies there;
- where codes are packed for one store and taken apart for another, half of a register is read before it is there
  (`kernels.tile.apart`).

12.9.86, which the same wheel brings for Blackwell, makes right ones, and is what later releases of Triton take from
Hopper on. So kernels of this backend are given to it, and those of everybody else are left alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from triton import knobs

from te_dispatch_triton.triton_private import ptx_version

#: The oldest that none of this is known of.
TRUSTED = (12, 9)
_NOTHING: Mapping[str, Any] = {}
#: Triton's setting is the process's, and so are the filters of warnings that its compiler changes meanwhile: one thread
#: compiles at a time.
_setting = threading.RLock()


class Assembler(NamedTuple):
    """An assembler, and the PTX version that Triton writes for it."""

    path: str
    ptx_version: int


@functools.cache
def replacement() -> Assembler | None:
    """What to take in place of the assembler that Triton has for chips before Blackwell; None where that is trusted, or
    there is no better one."""
    nvidia: Any = knobs.nvidia
    tools = [getattr(nvidia, name, None) for name in ("ptxas", "ptxas_blackwell")]
    own, other = (None if tool is None else release_of(str(tool.version)) for tool in tools)
    if own is None or own >= TRUSTED or other is None or other < TRUSTED:
        return None
    version = ptx_version(str(tools[1].version))  # type: ignore[union-attr]
    return None if version is None else Assembler(str(tools[1].path), version)  # type: ignore[union-attr]


def release_of(version: str) -> tuple[int, ...]:
    """``12.9`` as numbers."""
    return tuple(int(part) for part in version.split(".")[:2])


@contextmanager
def chosen(backend: str, arch: int | str) -> Iterator[Mapping[str, Any]]:
    """Kernels compiled within go to a trusted assembler; gives the options that Triton must be told beside.

    The PTX version is one of them: Triton keeps compiled kernels by their options, and would otherwise take a binary
    that the other assembler made. An older one would refuse it, too.

    Args:
        backend, arch: as in `triton.backends.compiler.GPUTarget`.
    """
    better = replacement() if backend == "cuda" and int(arch) < 100 else None
    if better is None:
        with _setting:
            yield _NOTHING
        return
    with _setting, knobs.nvidia.scope():
        knobs.nvidia.ptxas = better.path  # type: ignore[assignment]
        yield {"ptx_version": better.ptx_version}
