# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""AMD's own kernels of matrix products, executed without a GPU, beside the host library.

    amd_kernels.py HIP HIPBLASLT HOST_HIPBLASLT CASE...

HIP is the host's libamdhip64, HIPBLASLT is AMD's, to be run with the glibc that came along with it and with
HOST_HIP_DEVICES=gfx90a. AMD's library chooses a kernel and launches it; `gfx_emulator` executes its machine code.
Prints a JSON object for each case: the kernels, and of each result the share of elements with equal bits and the
largest difference from the host library's, in units of the last place.

The emulator is made for gfx942. Code for gfx90a that multiplies fp16 has the same encoding but for what is added here:
jumps to computed addresses, which Triton's code does not have, and a dot product.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # library.py

import library as lt
import numpy as np

import gfx_emulator
from gfx_emulator import code_object, machine, operands, registry
from gfx_emulator.registers import Jump

LANES = 64
#: Where code lies, for those who ask.
CODE = 0x2000_0000_0000
_ZSTD, _BUNDLE = b"\x28\xb5\x2f\xfd", b"__CLANG_OFFLOAD_BUNDLE__"


def extend_the_emulator() -> None:
    code_object._MACHINES[0x3F] = "gfx942"  # gfx90a
    builders = {"S_GETPC_B64": _get_place, "S_SETPC_B64": _jump, "S_SWAPPC_B64": _jump, "V_DOT2_F32_F16": _dot}
    for name, builder in builders.items():
        if name not in registry.implemented():
            registry.add([name], builder)
    machine.SIGNALS = machine.SIGNALS | {"S_SETPC_B64", "S_SWAPPC_B64"}


def _next(instruction: Any) -> int:
    return CODE + instruction.offset + instruction.size


def _get_place(instruction: Any, context: Any) -> Any:
    place = np.uint64(_next(instruction))
    return lambda active: active.set_s64(instruction["sdst"], np.full(active.count, place))


def _jump(instruction: Any, context: Any) -> Any:
    returns = instruction.name == "S_SWAPPC_B64"

    def execute(active: Any) -> None:
        targets = active.s64(instruction["ssrc0"]).astype(np.uint64)
        if not (targets == targets[0]).all():
            raise gfx_emulator.EmulatorError(f"{instruction}: waves that jump to different places")
        if returns:
            active.set_s64(instruction["sdst"], np.full(active.count, _next(instruction), np.uint64))
        active.signal = Jump(int(targets[0]) - CODE, np.ones(active.count, np.bool_))

    return execute


def _half(words: np.ndarray, shift: int) -> np.ndarray:
    """The fp16 in the lower or the upper half of each word, in float64."""
    return (words >> np.uint32(shift)).astype(np.uint16).view(np.float16).astype(np.float64)


def _dot(instruction: Any, context: Any) -> Any:
    """The sum of two products of fp16 and of a number in fp32, rounded once."""
    readers = [operands.vector(instruction[name], "u32", instruction) for name in ("src0", "src1", "src2")]

    def execute(active: Any) -> None:
        shape = (active.count, LANES)
        a, b, c = (np.array(np.broadcast_to(np.asarray(read(active)), shape), np.uint32) for read in readers)
        low, high = (_half(a, shift) * _half(b, shift) for shift in (0, 16))
        total = low + high + c.view(np.float32)
        active.set_v(instruction["vdst"] - 256, total.astype(np.float32).view(np.uint32))

    return execute


def elf(path: Path) -> bytes:
    """The code object in a file, which may be compressed, and in a bundle with others."""
    data = path.read_bytes()
    if data[:4] == b"CCOB":
        packed = data[data.index(_ZSTD) :]
        zstd = ctypes.CDLL("libzstd.so.1")
        zstd.ZSTD_getFrameContentSize.restype = zstd.ZSTD_decompress.restype = ctypes.c_size_t
        size = zstd.ZSTD_getFrameContentSize(packed, ctypes.c_size_t(len(packed)))
        out = ctypes.create_string_buffer(size)
        zstd.ZSTD_decompress(out, ctypes.c_size_t(size), packed, ctypes.c_size_t(len(packed)))
        data = out.raw
    if data.startswith(_BUNDLE):
        place = len(_BUNDLE) + 8
        for _ in range(struct.unpack_from("<Q", data, len(_BUNDLE))[0]):
            offset, size, length = struct.unpack_from("<QQQ", data, place)
            name = data[place + 24 : place + 24 + length]
            if b"gfx" in name:
                return data[offset : offset + size]
            place += 24 + length
    return data


class Emulated(lt.Library):
    """AMD's library, whose kernels the emulator executes. `arrays` are what they may access beside what the library
    allocates; `kernels` are the names of those that ran."""

    def __init__(self, hip: Path, hipblaslt: Path) -> None:
        super().__init__(hip, hipblaslt)
        self.arrays: list[np.ndarray] = []
        self.kernels: list[str] = []
        self.error: Exception | None = None
        self._code: dict[str, dict[str, Any]] = {}
        sizes = ctypes.POINTER(ctypes.c_uint32)
        text = ctypes.c_char_p
        kind = ctypes.CFUNCTYPE(ctypes.c_int, text, text, sizes, ctypes.c_void_p, ctypes.c_size_t)
        self._launcher = kind(self._launch)
        self.hip.host_hip_set_launcher(self._launcher)
        self.hip.host_hip_allocation.restype = ctypes.c_size_t

    def workspace(self, size: int) -> Any:
        made = np.zeros(max(size, 1), np.uint8)
        self.arrays.append(made)
        return ctypes.c_void_p(made.ctypes.data)

    def run(self, product: Any, choice: int = 0) -> None:
        try:
            super().run(product, choice)
        finally:
            if self.error is not None:
                raise self.error

    def _kernel(self, files: str, name: str) -> Any:
        for file in files.split("\n")[:-1]:
            if file not in self._code:
                self._code[file] = code_object.load(elf(Path(file)))
            if name in self._code[file]:
                return self._code[file][name]
        raise LookupError(f"no module has {name}")

    def _memory(self) -> gfx_emulator.Memory:
        memory = gfx_emulator.Memory()
        for array in self.arrays:
            raw = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
            memory.register(np.frombuffer(raw, np.uint8), array.ctypes.data, "an operand")
        address, number = ctypes.c_void_p(), 0
        while size := self.hip.host_hip_allocation(ctypes.c_size_t(number), ctypes.byref(address)):
            raw = (ctypes.c_uint8 * size).from_address(address.value)
            memory.register(np.frombuffer(raw, np.uint8), address.value, "an allocation")
            number += 1
        return memory

    def _launch(self, files: bytes, name: bytes, sizes: Any, arguments: int, size: int) -> int:
        try:
            kernel = self._kernel(files.decode(), name.decode())
            items, workgroup = [sizes[i] for i in range(3)], [sizes[i] for i in range(3, 6)]
            grid = [whole // part for whole, part in zip(items, workgroup)]
            # Kernels read their arguments in pieces of up to 64 bytes.
            segment = ctypes.string_at(arguments, size) + bytes(kernel.descriptor.kernarg_bytes + 64)
            gfx_emulator.launch(kernel, self._memory(), grid, workgroup, segment, sizes[6])
            self.kernels.append(name.decode())
        except Exception as error:
            self.error = self.error or error
            return 1
        return 0


M, N, K = 32, 48, 64
_RANDOM = np.random.default_rng(1)
_BIAS, _AUX = _RANDOM.standard_normal(M), _RANDOM.standard_normal((M, N))


def half(values: Any) -> np.ndarray:
    return np.asarray(values).astype(np.float16, order="F")


#: By name: whether A and B are turned, the descriptor's attributes, arrays among them, and which of these are results.
CASES: dict[str, tuple[bool, bool, dict[str, Any], tuple[str, ...]]] = {
    "gelu_aux_bias": (
        True, False,
        {"epilogue": lt.GELU_AUX_BIAS, "bias": half(_BIAS), "aux": half(np.zeros((M, N))), "aux_ld": M}, ("aux",),
    ),
    "dgelu_bgrad": (
        False, False,
        {"epilogue": lt.DGELU_BGRAD, "bias": half(np.zeros(M)), "aux": half(_AUX), "aux_ld": M}, ("bias",),
    ),
    "bgrada": (False, True, {"epilogue": lt.BGRADA, "bias": half(np.zeros(M))}, ("bias",)),
    "bgradb": (False, True, {"epilogue": lt.BGRADB, "bias": half(np.zeros(N))}, ("bias",)),
    "bgradb_fp32": (
        False, True, {"epilogue": lt.BGRADB, "bias": np.zeros(N, np.float32), "bias_type": lt.R_32F}, ("bias",),
    ),
}  # fmt: skip


def results(library: lt.Library, case: str) -> dict[str, np.ndarray]:
    """D and the results of the epilogue, by name."""
    turned_a, turned_b, attributes, names = CASES[case]
    random = np.random.default_rng(2)
    a = half(random.standard_normal((K, M) if turned_a else (M, K)))
    b = half(random.standard_normal((N, K) if turned_b else (K, N)))
    d = half(random.standard_normal((M, N)))
    own = {name: value.copy(order="F") for name, value in attributes.items() if isinstance(value, np.ndarray)}
    if isinstance(library, Emulated):
        library.arrays[:] = [a, b, d, *own.values()]
    given = {**attributes, **{name: value.ctypes.data for name, value in own.items()}}
    given |= {"transa": lt.OP_T if turned_a else lt.OP_N, "transb": lt.OP_T if turned_b else lt.OP_N}
    matrices = [lt.Matrix(lt.R_16F, *x.shape, x.ctypes.data) for x in (a, b, d)]
    library.run(lt.Product(*matrices, given, alpha=0.125, beta=1.0))
    return {"d": d, **{name: own[name] for name in names}}


def compared(found: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """The share of equal bits, and the largest difference in units of the last place of the larger magnitude."""
    difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    unit = np.spacing(np.maximum(np.abs(found), np.abs(expected))).astype(np.float64)
    return {"equal": float((found == expected).mean()), "units": float((difference / unit).max())}


def main() -> None:
    hip, hipblaslt, host_hipblaslt = (Path(one) for one in sys.argv[1:4])
    extend_the_emulator()
    amd, host = Emulated(hip, hipblaslt), lt.Library(hip, host_hipblaslt)
    for case in sys.argv[4:]:
        amd.kernels.clear()
        found, expected = results(amd, case), results(host, case)
        told = {name: compared(found[name], expected[name]) for name in expected}
        print(json.dumps({"case": case, "kernels": amd.kernels, **told}), flush=True)


if __name__ == "__main__":
    main()
