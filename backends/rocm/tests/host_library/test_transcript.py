# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The host library answers as AMD's own: the same program calls both and prints what they say.

AMD's library runs without a GPU as far as descriptors go; and on the host's libamdhip64, as far as the launch of a
kernel, for the chips whose kernels Debian's package has. There the binding itself runs on it, too.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
HIP, HIPBLASLT = "libamdhip64.so.7", "libhipblaslt.so.1"


@pytest.fixture(scope="session")
def real_hip(packages, real) -> Path:
    (found,) = packages.library_folder(real).glob("libamdhip64.so.[0-9]")
    return found


def both(run, packages, real, program, host_arguments, real_arguments, before=(), **variables):
    """What came of the program with the host library, and what with AMD's."""
    ours = run([str(program), *host_arguments], **variables)
    theirs = run([*packages.command(real, program, before), *real_arguments], **variables)
    return ours, theirs


def lines(done) -> list[str]:
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_descriptors_and_errors(run, builder, folder, packages, real, real_hip):
    program = builder.program("transcript.cpp")
    ours, theirs = both(
        run, packages, real, program, [str(folder / HIP), str(folder / HIPBLASLT)], [real_hip.name, HIPBLASLT],
        HOST_HIP_DEVICES="", HIP_VISIBLE_DEVICES="-1",
    )  # fmt: skip
    assert lines(ours) == lines(theirs)
    assert len(lines(ours)) > 500


def test_a_handle_without_a_device_ends_the_process(run, builder, folder, packages, real, real_hip):
    program = builder.program("transcript.cpp")
    ours, theirs = both(
        run, packages, real, program, [str(folder / HIP), str(folder / HIPBLASLT), "create"],
        [real_hip.name, HIPBLASLT, "create"], HOST_HIP_DEVICES="", HIP_VISIBLE_DEVICES="-1",
    )  # fmt: skip
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout) == (1, "")


@pytest.fixture(scope="session")
def host_runtime(tmp_path_factory, folder, real_hip) -> Path:
    """The host's libamdhip64 alone, under the name that AMD's libhipblaslt looks for."""
    made = tmp_path_factory.mktemp("runtime")
    (made / real_hip.name).symlink_to(folder / HIP)
    return made


#: The release of hipBLASLt that algorithms.cpp follows; others have some kernels more or fewer.
KNOWN = "7.2."


def agree(ours: list[str], theirs: list[str], packages, real) -> None:
    """All answers are the same; of another release than the known one, 19 in 20."""
    differing = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    release = packages.versions(real)["libhipblaslt-dev"]
    if release.startswith(KNOWN):
        assert differing == []
    elif differing:
        warnings.warn(f"hipBLASLt {release} differs in {len(differing)} answers: {differing}", stacklevel=2)
        assert len(differing) <= len(ours) / 20


def need_kernels(packages, real, chip) -> None:
    kernels = packages.library_folder(real) / "hipblaslt" / "library" / f"TensileLibrary_lazy_{chip}.dat"
    if not kernels.is_file():
        pytest.skip(f"skipped: unavailable: AMD's package has no kernels for {chip}")


# AMD's library takes a tenth of a second to find that it has no algorithm for gfx90a, which has many kernels.
@pytest.mark.parametrize("chip", ["gfx1100", "gfx1201", pytest.param("gfx90a", marks=pytest.mark.slow)])
def test_which_products_have_an_algorithm(run, builder, folder, packages, real, host_runtime, chip):
    need_kernels(packages, real, chip)
    program = builder.program("heuristics.cpp")
    ours, theirs = both(
        run, packages, real, program, [str(folder / HIPBLASLT)], [HIPBLASLT], [host_runtime], HOST_HIP_DEVICES=chip
    )
    agree(lines(ours), lines(theirs), packages, real)
    assert sum(line.endswith("1 found") for line in lines(ours)) > 50


@pytest.mark.parametrize("chip", ["gfx1100", pytest.param("gfx1201", marks=pytest.mark.slow)])
def test_the_binding_plans_the_same_products(run, folder, packages, real, host_runtime, chip):
    """The descriptors that the binding makes are good for AMD's library, which then has an algorithm for the products
    that the host library has one for; it gets as far as the launch of a kernel."""
    pytest.importorskip("te_dispatch_rocm", reason="the backend is installed where its module is built: make rocm")
    need_kernels(packages, real, chip)
    script = str(HERE / "programs" / "binding_plans.py")
    libpython = Path(sysconfig.get_config_var("LIBDIR"))
    python = packages.command(real, Path(sys.executable), after=[libpython])
    paths = os.pathsep.join((str(host_runtime), str(packages.library_folder(real))))
    ours = lines(run([sys.executable, script, "run"], HOST_HIP_DEVICES=chip, TE_DISPATCH_ROCM_PATH=str(folder)))
    theirs = lines(run([*python, script, "run"], HOST_HIP_DEVICES=chip, TE_DISPATCH_ROCM_PATH=paths))
    agree(ours[:-1], theirs[:-1], packages, real)
    assert (ours[-1], theirs[-1]) == ("ran: [64.0]", "did not run: hipblasLtMatmul: internal error (6)")
    planned = [line for line in ours if line.endswith("some candidates")]
    assert 30 < len(planned) < len(ours) - 30


@pytest.fixture
def on_amd_kernels(run, packages, real, host_runtime, real_hip):
    """on_amd_kernels(program, *arguments) are the objects that a program prints which runs AMD's library and AMD's
    machine code for gfx90a, the latter executed by the emulator."""
    pytest.importorskip("gfx_emulator", reason="the emulator is part of the test environment: make test installs it")
    pytest.importorskip("tinygrad", reason="the emulator decodes with tinygrad, which needs Python 3.11")
    need_kernels(packages, real, "gfx90a")
    libraries = packages.library_folder(real)
    libpython = Path(sysconfig.get_config_var("LIBDIR"))
    python = packages.command(real, Path(sys.executable), before=[host_runtime], after=[libpython])
    paths = os.pathsep.join((str(host_runtime), str(libraries)))

    def go(program: str, *arguments: str):
        files = [str(host_runtime / real_hip.name), str(libraries / HIPBLASLT)]
        command = [*python, str(HERE / "programs" / program), *files, *arguments]
        told = lines(run(command, HOST_HIP_DEVICES="gfx90a", TE_DISPATCH_ROCM_PATH=paths))
        return {one["case"]: one for one in map(json.loads, told)}

    return go


@pytest.mark.slow  # the emulator decodes some ten thousand instructions
def test_amd_s_kernels_compute_what_the_host_library_computes(on_amd_kernels, folder):
    """Factors, what is added, the auxiliary matrix, GELU both ways, bias gradients."""
    cases = ["gelu_aux_bias", "dgelu_bgrad", "bgrada", "bgradb", "bgradb_fp32"]
    told = on_amd_kernels("amd_kernels.py", str(folder / HIPBLASLT), *cases)
    assert list(told) == cases
    for case, one in told.items():
        assert one["kernels"][0].startswith("Cijk_"), case
        # Sums in another order round to the other neighbour in fp16 now and then; GELU of a negative number is a
        # difference, which keeps the errors of its tangent in fp32.
        assert one["d"]["equal"] > 0.95 and one["d"]["units"] <= (8 if "gelu" in case else 1), one
        assert one.get("aux", {"units": 0})["units"] <= 1, one
        assert one.get("bias", {"units": 0})["units"] <= 1, one


@pytest.mark.slow
def test_the_binding_multiplies_with_amd_s_kernels(on_amd_kernels):
    """The results that te_dispatch's caller would get on gfx90a, within a rounding of float64."""
    pytest.importorskip("te_dispatch_rocm", reason="the backend is installed where its module is built: make rocm")
    told = on_amd_kernels("binding_on_amd_kernels.py")
    assert list(told) == ["gelu", "dgelu", "bgrad_a", "bgrad_b"]
    for case, one in told.items():
        assert one["kernels"][0].startswith("Cijk_"), case
        assert max(one["units"].values()) < 0.75, one  # half a unit, and fp32's roundings before


def test_answers_of_another_release_may_differ_a_little(packages, tmp_path):
    known, later, ours = tmp_path / "known", tmp_path / "later", ["yes"] * 100
    for folder, version in ((known, "7.2.4+dfsg-1"), (later, "7.3.0-1")):
        folder.mkdir()
        (folder / "versions").write_text(f"libhipblaslt-dev={version}\n")
    five, six = (["no"] * count + ["yes"] * (100 - count) for count in (5, 6))
    agree(ours, ours, packages, known)
    with pytest.raises(AssertionError):
        agree(ours, five, packages, known)
    with pytest.warns(UserWarning, match=r"7\.3\.0-1 differs in 5 answers"):
        agree(ours, five, packages, later)
    with pytest.warns(UserWarning), pytest.raises(AssertionError):
        agree(ours, six, packages, later)


def test_another_chip_s_answers_differ(run, builder, folder):
    """That the comparison can fail."""
    program = builder.program("heuristics.cpp")
    command = [str(program), str(folder / HIPBLASLT)]
    chips = ("gfx1100", "gfx1201", "gfx90a", "gfx942")
    assert len({tuple(lines(run(command, HOST_HIP_DEVICES=chip))) for chip in chips}) == 4
