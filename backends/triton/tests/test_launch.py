# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a launch is keyed by, and what it says where it cannot be: with a compiler and launchers that are planted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
launch = pytest.importorskip("te_dispatch_triton.launch")
kinds = pytest.importorskip("te_dispatch_triton.kinds")
knobs = pytest.importorskip("triton.knobs")

from te_dispatch.core.errors import CaptureError  # noqa: E402
from te_dispatch_triton.targets import target_for  # noqa: E402

DEVICE = torch.device("cuda", 0)
GRID, CONFIG = (3, 2, 1), launch.Config()
#: What `miscompiled` finds.
WRONG = "%1 = fpext bfloat %0 to float\n%2 = fptrunc float %1 to half\n%3 = fmul half %2, %2"


class Planted:
    """A jitted function that counts compilations; what it compiles to notes its launches."""

    __name__ = "planted"
    params = (SimpleNamespace(name="x", is_constexpr=False), SimpleNamespace(name="BLOCK", is_constexpr=True))

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        #: Numbers of warps that make a right binary; and those of every compilation, and whether it was launched.
        self.right: tuple[int, ...] = (1, 2, 4, 8, 16)
        self.warps: list[tuple[int, bool]] = []
        self.gluon = False

    def is_gluon(self) -> bool:
        return self.gluon

    def run(self, *args: Any, grid: Any, warmup: bool, num_warps: int, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        if not warmup:
            self.compiled.append(args)
        self.warps.append((num_warps, not warmup))
        run = lambda *given: self.launched.append(given)  # noqa: E731
        asm = {} if num_warps in self.right else {"llir": WRONG}
        return SimpleNamespace(run=run, function=77, packed_metadata=(4, 1, 0), asm=asm)


class Tensor:
    """What a launch looks at of a tensor."""

    def __init__(self, address: int = 4096, dtype: Any = torch.float32, size: int = 100) -> None:
        self.address, self.dtype, self.size = address, dtype, size

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> Any:
        return SimpleNamespace(size=lambda: self.size)


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    monkeypatch.setattr(launch, "target_of", lambda device: target_for("nvidia", "sm_90"))
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 1234)
    monkeypatch.setattr(launch, "_current", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield Planted()


def compilations(function: Planted, *calls: tuple[Any, ...], config: Any = CONFIG) -> int:
    kernel = launch.Kernel(function)
    for args in calls:
        kernel(DEVICE, GRID, args, (64,), config)
    return len(function.compiled)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (((Tensor(4096),), (Tensor(8192),)), 1),
        (((Tensor(4096),), (Tensor(4100),), (Tensor(4104),)), 2),  # a multiple of 16, and two that are not
        (((Tensor(dtype=torch.float32),), (Tensor(dtype=torch.bfloat16),)), 2),
        (((Tensor(),), (None,)), 2),
        (((17,), (19,)), 1),
        (((16,), (32,), (17,)), 2),
        (((1,), (17,)), 2),  # 1 becomes a constant
        (((2**31 + 1,), (17,), (2**31 - 1,)), 2),  # 32 bits or 64
        (((-(2**31) - 1,), (17,)), 2),
        (((2**31,), (2**31 + 16,), (16,)), 2),
        (((0,), (16,)), 1),
        (((0.5,), (1.0,)), 1),
        (((0.5,), (None,)), 2),
        ((((2**62, 2**62 + 1),), ((2**62, 2**62 + 2),), ((2**62,),)), 2),
    ],
)
def test_a_kind_of_call_is_what_triton_specializes_on(
    function: Planted, calls: tuple[tuple[Any, ...], ...], expected: int
) -> None:
    assert compilations(function, *calls) == expected


def test_on_amd_also_whether_32_bits_reach_all_of_a_tensor(function: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(Tensor(size=2**31 - 1),), (Tensor(size=2**31),), (Tensor(size=5),)]
    assert compilations(function, *sizes) == 1
    function.compiled.clear()
    monkeypatch.setattr(launch, "READERS", {})
    monkeypatch.setattr(launch, "reader_of", lambda classes: kinds.reader_of(classes, amd=True))
    assert compilations(function, *sizes) == 2


def test_constants_configurations_and_devices_are_kinds_too(function: Planted) -> None:
    kernel = launch.Kernel(function)
    for device, constants, config in (
        (DEVICE, (64,), CONFIG), (DEVICE, (128,), CONFIG), (DEVICE, (64,), launch.Config(num_warps=8)),
        (DEVICE, (64,), launch.Config(fp_fusion=True)), (DEVICE, (64,), launch.Config(options=(("waves_per_eu", 2),))),
        (torch.device("cuda", 1), (64,), CONFIG),
    ):  # fmt: skip
        kernel(device, GRID, (Tensor(),), constants, config)
    assert len(function.compiled) == 6


def test_later_calls_hand_over_addresses(function: Planted) -> None:
    kernel = launch.Kernel(function)
    for address in (4096, 8192):
        kernel(DEVICE, GRID, (Tensor(address), 17, None, 0.5), (64,), CONFIG)
    assert len(function.compiled) == 1
    assert function.launched == [(*GRID, 1234, 77, (4, 1, 0), None, None, None, 8192, 17, None, 0.5, 64)]


def test_hooks_of_profilers_are_called_by_tritons_own_path(function: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = launch.Kernel(function)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
    for _ in range(2):
        kernel(DEVICE, GRID, (Tensor(),), (64,), CONFIG)
    assert len(function.compiled) == 2 and not function.launched


def test_a_capture_is_not_broken_by_a_compilation(function: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = launch.Kernel(function)
    kernel(DEVICE, GRID, (Tensor(),), (64,), CONFIG)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel(DEVICE, GRID, (Tensor(),), (64,), CONFIG)  # compiled before: that is fine
    with pytest.raises(CaptureError, match=r"planted is not compiled for this kind of call.*once before the capture"):
        kernel(DEVICE, GRID, (Tensor(4097),), (64,), CONFIG)
    assert len(function.compiled) == 1 and len(function.launched) == 1


def test_a_failure_names_kernel_chip_and_configuration(function: Planted) -> None:
    function.error = RuntimeError("out of resource: shared memory")
    function.error.__cause__ = ValueError("the innermost reason")
    with pytest.raises(launch.CompileFailure) as error:
        launch.Kernel(function)(
            DEVICE, GRID, (Tensor(),), (64,), launch.Config(num_warps=8, options=(("maxnreg", 64),))
        )
    told = str(error.value)
    for part in (
        "planted", "sm_90", "BLOCK=64", "num_warps=8", "num_stages=2", "maxnreg=64", "out of resource: shared memory",
        "the innermost reason",
    ):  # fmt: skip
        assert part in told


def test_recording_notes_launches_instead_of_making_them(function: Planted) -> None:
    kernel, noted = launch.Kernel(function), []
    x = torch.ones(4)
    with launch.recording(noted):
        kernel(torch.device("cpu"), GRID, (x, 3), (64,), CONFIG)
    assert noted == [launch.Launch(kernel, GRID, (x, 3), (64,), CONFIG, torch.device("cpu"))]
    assert not function.compiled
    kernel(DEVICE, GRID, (Tensor(),), (64,), CONFIG)
    assert len(noted) == 1 and len(function.compiled) == 1


@pytest.mark.parametrize(("size", "block", "expected"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_blocks_cover_a_size(size: int, block: int, expected: int) -> None:
    assert launch.blocks(size, block) == expected


@pytest.mark.parametrize("gluon", [False, True])
def test_a_wrong_binary_is_not_launched(function: Planted, gluon: bool) -> None:
    function.right, function.gluon = (), gluon
    kernel = launch.Kernel(function)
    for _ in range(2):
        with pytest.raises(launch.CompileFailure, match=r"planted for sm_90 .*Triton .* miscompiles it \(.*policy"):
            kernel(DEVICE, GRID, (Tensor(),), (64,), CONFIG)
    assert not any(launched for _, launched in function.warps)
    assert len(function.warps) == 2 * (1 if gluon else 3)


@pytest.mark.parametrize("right", [(8, 2), (2,)])
def test_another_number_of_warps_is_taken(
    function: Planted, right: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    function.right = right
    kernel = launch.Kernel(function)
    kernel(DEVICE, GRID, (Tensor(),), (64,), CONFIG)
    assert [warps for warps, launched in function.warps if launched] == [right[0]]
    # Profilers are told by Triton's own path, which compiles for each number of warps anew.
    monkeypatch.setattr(launch, "observed", lambda: True)
    kernel(DEVICE, GRID, (Tensor(),), (64,), CONFIG)
    assert function.warps[-1] == (right[0], True)
