# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Kernels to execute in tests: assembled from text, or compiled by Triton. Both need the package ``triton``, whose AMD
compiler runs on any machine."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gfx_emulator import arguments, code_object, decode, machine
from gfx_emulator.arrays import Array
from gfx_emulator.code_object import Kernel
from gfx_emulator.memory import Memory

ARCHS = ("gfx942", "gfx950")
#: Loads the addresses of two buffers and makes v1 the byte offset of a work-item's word.
PROLOGUE = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  v_lshlrev_b32 v1, 2, v0
  s_waitcnt lgkmcnt(0)
"""
STORE = """
  global_store_dword v1, v2, s[4:5]
  s_endpgm
"""
_GLOBAL = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.amdhsa_code_object_version 5
.text
.globl program
.p2align 8
.type program,@function
program:
{body}
.Lend:
.size program, .Lend-program
.rodata
.p2align 6
.amdhsa_kernel program
  .amdhsa_next_free_vgpr {vgprs}
  .amdhsa_next_free_sgpr 96
  .amdhsa_accum_offset {accum_offset}
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_kernarg_size {kernarg}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_float_denorm_mode_32 {denorm}
  .amdhsa_ieee_mode 1
.end_amdhsa_kernel
"""


def words(count: int = 64) -> Array:
    """A buffer of 32-bit zeros for a kernel to write."""
    return np.zeros(count, np.uint32)


def missing() -> str | None:
    """Why kernels cannot be made and executed here, None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton, whose AMD compiler makes the kernels, is not installed"
    return decode.missing()


def assembled(
    body: str, arch: str = "gfx942", lds: int = 0, kernarg: int = 64, vgprs: int = 128, accum_offset: int = 64,
    denorm: int = 3,
) -> Kernel:  # fmt: skip
    """A kernel of instructions as text.

    When it starts, s[0:1] is the address of its arguments, s2 the workgroup and v0 the work-item.
    """
    return code_object.load(assembled_code(body, arch, lds, kernarg, vgprs, accum_offset, denorm))["program"]


def assembled_code(
    body: str, arch: str, lds: int = 0, kernarg: int = 64, vgprs: int = 128, accum_offset: int = 64, denorm: int = 3
) -> bytes:
    """The code object of `assembled`; its kernel is named ``program``."""
    from triton._C.libtriton import amd, llvm

    llvm.init_targets()
    text = _GLOBAL.format(
        arch=arch, body=body, vgprs=vgprs, accum_offset=accum_offset, lds=lds, kernarg=kernarg, denorm=denorm
    )
    with tempfile.TemporaryDirectory() as folder:
        objects, linked = Path(folder) / "object", Path(folder) / "linked"
        objects.write_bytes(amd.assemble_amdgcn(text, "amdgcn-amd-amdhsa", arch, ""))
        amd.link_hsaco(str(objects), str(linked))
        return linked.read_bytes()


def run(kernel: Kernel, buffers: Sequence[Array], grid: int = 1, items: int = 64, scalars: bytes = b"") -> None:
    """Launch an assembled kernel, whose arguments are the buffers' addresses, then the scalars' bytes."""
    memory = Memory()
    addresses = [memory.register(buffer, name=f"buffer {i}") for i, buffer in enumerate(buffers)]
    segment = np.array(addresses, np.int64).tobytes() + scalars
    machine.launch(kernel, memory, (grid,), (items,), segment.ljust(kernel.descriptor.kernarg_bytes, b"\0"))


class Compiled:
    """A Triton kernel compiled for a chip.

    Args:
        function: decorated by `triton.jit`.
        signature: types of the parameters, ``constexpr`` for those in `constants`.
    """

    def __init__(
        self, function: Any, signature: Mapping[str, str], constants: Mapping[str, Any], arch: str, warps: int = 4
    ) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        source = ASTSource(function, dict(signature), {(list(signature).index(k),): v for k, v in constants.items()})
        options = {"num_warps": warps, "enable_fp_fusion": False}
        binary: Any = triton.compile(source, target=GPUTarget("hip", arch, 64), options=options)
        self.assembly: str = binary.asm["amdgcn"]
        self.kernel = code_object.load(binary.asm["hsaco"])[binary.metadata.name]
        self.warps, self.shared = warps, int(binary.metadata.shared)

    def __call__(self, grid: Sequence[int], values: Sequence[Any]) -> int:
        """Launch it with arrays, which are accessed in place, and numbers; returns the instructions executed."""
        memory = Memory()
        given = [
            memory.register(v, name=f"argument {i}") if isinstance(v, np.ndarray) else v for i, v in enumerate(values)
        ]
        # Triton's kernels have scratch pointers after their own arguments.
        given += [0] * (sum(not one.kind.startswith("hidden_") for one in self.kernel.arguments) - len(given))
        segment = arguments.packed(self.kernel, given)
        return machine.launch(self.kernel, memory, grid, (64 * self.warps,), segment, dynamic_lds=self.shared)
