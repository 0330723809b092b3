# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What kernels are compiled for: a chip's limits and units, from its name alone and never from the process.

The same numbers serve a device that is here and one that is only compiled for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_dispatch.backend_kit import caches
from te_dispatch.core.facts import Arch
from te_dispatch_triton.archs import ARCHS

_KIB = 1024
#: Shared memory that one program can have, in bytes. NVIDIA: CUDA C++ Programming Guide, "Technical Specifications
#: per Compute Capability"; AMD: the local data share, CDNA and RDNA instruction set manuals.
_SHARED: dict[str, int] = {
    "sm_80": 163 * _KIB, "sm_86": 99 * _KIB, "sm_87": 163 * _KIB, "sm_89": 99 * _KIB, "sm_90": 227 * _KIB,
    "sm_100": 227 * _KIB, "sm_103": 227 * _KIB, "sm_120": 99 * _KIB, "sm_121": 99 * _KIB,
    "gfx90a": 64 * _KIB, "gfx942": 64 * _KIB, "gfx950": 160 * _KIB, "gfx1100": 64 * _KIB, "gfx1200": 64 * _KIB,
    "gfx1201": 64 * _KIB,
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Attributes:
    backend: ``cuda`` or ``hip`` as Triton names its compilers; ``interpreter`` for Triton's interpreter.
    arch: as the vendor writes it (``sm_90``, ``gfx942``); ``interpreter``.
    warp_size: threads of a warp or wavefront.
    shared_memory: bytes one program can have.
    encodings: FP8 encodings with conversion instructions; kernels encode the others by integer arithmetic.
    dots: FP8 encodings whose products the matrix units take; other codes are decoded to 16 bits first.
    scaled: microscalings (``mxfp8``, ``nvfp4``) that the matrix units apply.
    descriptors: whether loads and stores of tiles through tensor descriptors are done by hardware (TMA).
    processors: multiprocessors or compute units; 1 where nobody counted.
    """

    backend: str
    arch: str
    warp_size: int
    shared_memory: int
    encodings: frozenset[str] = frozenset()
    dots: frozenset[str] = frozenset()
    descriptors: bool = False
    processors: int = 1
    scaled: frozenset[str] = frozenset()

    def __hash__(self) -> int:
        return hash(self.arch)  # whose hash is at hand: targets are among what calls are told apart by

    @property
    def triton_arch(self) -> int | str:
        """The arch as `triton.backends.compiler.GPUTarget` takes it."""
        return int(self.arch.removeprefix("sm_")) if self.backend == "cuda" else self.arch

    def conversion(self, encoding: str) -> int:
        """How kernels convert to an encoding, as the constant HARD of `kernels.codes.encode`."""
        return 0 if encoding not in self.encodings else 2 if self.backend == "cuda" else 1

    def conversion_of_cast(self, encoding: str) -> int:
        """The same of a cast: of one to e2m1, which is converted to in steps, how its blocks' scales are."""
        return self.conversion("e4m3fn" if encoding == "e2m1" else encoding)


INTERPRETER = Target("interpreter", "interpreter", 32, 1 << 30)


def target_for(vendor: str, arch: str, processors: int = 1) -> Target:
    """The target of a chip.

    Raises:
        ValueError: of a vendor that Triton does not compile for.
    """
    if vendor not in ARCHS:
        raise ValueError(f"vendor {vendor}: expected {' or '.join(ARCHS)}")
    table = ARCHS[vendor].get(arch, Arch(warp_size=64 if arch.startswith("gfx9") else 32))
    units = frozenset(table.encodings)
    return Target(
        "cuda" if vendor == "nvidia" else "hip",
        arch,
        table.warp_size,
        _SHARED.get(arch, 64 * _KIB),
        units,
        units if table.fp8_matmul else frozenset(),
        vendor == "nvidia" and int(arch.removeprefix("sm_")) >= 90,
        processors,
        frozenset(table.block_scaled_matmul),
    )


_targets: dict[torch.device, Target] = {}


def target_of(device: torch.device) -> Target:
    """The target of a device of this machine; the interpreter for the CPU."""
    found = _targets.get(device)
    if found is None:
        found = _targets[device] = _look(device)
    return found


def _look(device: torch.device) -> Target:
    if device.type == "cpu":
        return INTERPRETER
    properties: Any = torch.cuda.get_device_properties(device)
    processors = int(properties.multi_processor_count)
    if torch.version.hip is not None:
        return target_for("amd", str(properties.gcnArchName).partition(":")[0], processors)
    return target_for("nvidia", f"sm_{properties.major}{properties.minor}", processors)


def pretend(device: torch.device, target: Target | None) -> None:
    """Let a device stand for another target (None: itself again), for compiling without hardware."""
    if target is None:
        _targets.pop(device, None)
    else:
        _targets[device] = target
    caches.clear("te_dispatch_triton.")
