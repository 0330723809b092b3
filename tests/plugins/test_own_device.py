# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The example of a plugin with native code, for a device of PyTorch's own kind, built and installed as by its users."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from .workshop import REPOSITORY, Environment, build_wheel, create_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the device is compiled: needs g++"),
]

EXAMPLE = REPOSITORY / "examples" / "npu_backend"
EXERCISE = Path(__file__).with_name("own_device.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npu")
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "*.so"))
    return build_wheel(source, folder)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path], wheel: Path) -> Environment:
    others = (wheels[f"te-dispatch{name}"] for name in ("", "-reference", "-torch"))
    return create_environment(tmp_path_factory.mktemp("own_device") / "venv", *others, wheel)


def test_the_wheel_is_of_one_platform_and_holds_both_libraries(wheel: Path) -> None:
    assert "linux" in wheel.name and not wheel.name.endswith("none-any.whl")
    compiled = {name.partition(".")[0] for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    assert compiled == {"npu_device/_device", "te_dispatch_npu/_kernels"}


def test_modules_train_on_it(environment: Environment) -> None:
    found, _ = environment.run(EXERCISE)
    assert found["devices"] == ["npu:0"]
    assert found["autocast"] == "torch.bfloat16" and found["compiled"]
    # Sums of 32 and 48 products in fp32, in another order.
    assert found["error"] < 1e-5
    served = {(name, implementation) for name, implementation, _ in found["served"]}
    assert {("rmsnorm_fwd", "npu.rmsnorm_fwd"), ("rmsnorm_bwd", "npu.rmsnorm_bwd")} <= served
    assert {("gemm", "torch.matmul"), ("gemm", "torch.emulated_gemm")} <= served
    threads = {(name, main) for name, _, main in found["served"] if name.startswith("rmsnorm")}
    assert threads == {("rmsnorm_fwd", True), ("rmsnorm_bwd", False)}, "autograd has a thread for the device"


def test_the_command_line_knows_it(environment: Environment) -> None:
    report = environment.doctor()
    assert report["problems"] == []
    facts = {d["device"]: d["facts"] for d in report["devices"]}
    assert facts["tide:n1"]["version.tide_driver"] == "1.0"
    explained = environment.command("explain", "rmsnorm_fwd", "x.dtype=fp32", "gamma.dtype=fp32", "--device", "npu:0")
    assert explained.returncode == 0 and "npu.rmsnorm_fwd" in explained.stdout.split("chosen")[0]


def test_its_kernels_are_right_there(environment: Environment, tmp_path: Path) -> None:
    done = environment.command(
        "conformance", "--backend", "npu", "--device", "npu:0", "--level", "smoke", "--out", str(tmp_path)
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout and "0 claimed" not in done.stdout.split()


def test_a_wheel_without_kernels_says_so_and_stands_back(environment: Environment) -> None:
    kernels = next((environment.site_packages / "te_dispatch_npu").glob("_kernels*.so"))
    hidden = kernels.rename(kernels.with_suffix(".hidden"))
    try:
        backend = next(b for b in environment.doctor()["backends"] if b["name"] == "npu")
        assert not backend["available"] and "for lack of a C compiler: install gcc or clang" in str(backend)
        found, _ = environment.run(EXERCISE)
        assert ["rmsnorm_fwd", "torch.rmsnorm_fwd", True] in found["served"]
    finally:
        hidden.rename(kernels)
