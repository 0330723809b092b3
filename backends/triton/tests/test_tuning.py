# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What tuning keeps and what calls make of it; the timing itself is tested on a GPU."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from te_dispatch_triton import configs, gemm_plans, probe, tuning, tuning_cache  # noqa: E402
from te_dispatch_triton.launch import Config  # noqa: E402
from te_dispatch_triton.targets import target_for  # noqa: E402

HOPPER = target_for("nvidia", "sm_90", 132)
CODES, SIZES = ("e4m3fn", "e4m3fn"), (8192, 4096, 4096)
ENTRY = {"constants": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}, "num_warps": 4, "num_stages": 3, "options": {}}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(tuning_cache.DIRECTORY, str(tmp_path))
    tuning.forget()
    yield tuning.cache_file()
    tuning.forget()


def found(**changed: Any) -> Any:
    given = {"family": "gemm", "kernel": "fp8", "target": HOPPER, "codes": CODES, "sizes": SIZES, "fp_fusion": True}
    return tuning_cache.tuned(**{**given, **changed})


def keep(**changed: Any) -> None:
    given = {"family": "gemm", "kernel": "fp8", "target": HOPPER, "codes": CODES, "sizes": SIZES}
    tuning_cache.write(tuning.cache_file(), {tuning_cache.key_of(**{**given, **changed}): ENTRY})
    tuning.forget()


def test_what_is_kept_is_found_again(cache: Path) -> None:
    assert found() is None and not cache.exists()
    keep()
    assert found() == configs.Choice(ENTRY["constants"], Config(4, 3, True))
    assert tuning_cache.entry_of(found()) == ENTRY
    assert not list(cache.parent.glob("*.new"))


@pytest.mark.parametrize(
    "other",
    [
        {"kernel": "fp8_split"},
        {"target": target_for("nvidia", "sm_90", 114)},
        {"target": target_for("nvidia", "sm_100", 132)},
        {"codes": ("e5m2", "e4m3fn")},
        {"codes": ("e4m3fnuz", "e4m3fnuz")},
        {"sizes": (8192, 4096, 8192)},
    ],
    ids=["kernel", "processors", "arch", "code", "fnuz", "sizes"],
)
def test_an_entry_serves_nothing_else(cache: Path, other: dict[str, Any]) -> None:
    keep()
    assert found() is not None and found(**other) is None


def test_nor_another_release_of_triton(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep()
    monkeypatch.setattr(probe, "triton_version", lambda: "99.0")
    assert found() is None


def test_sizes_share_buckets_of_a_quarter_octave(cache: Path) -> None:
    keep()
    assert found(sizes=(8000, 4000, 4096)) is not None
    assert found(sizes=(8200, 4096, 4096)) is None
    edges = [size for size in range(1, 70) if tuning_cache.bucket(size) == size]
    assert edges == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert all(size <= tuning_cache.bucket(size) <= size * 1.25 + 1 for size in range(1, 5000))


def test_a_plan_takes_what_was_tuned(cache: Path) -> None:
    given = dict.fromkeys(gemm_plans.Problem._fields, False)
    given |= {"m": SIZES[0], "n": SIZES[1], "k": SIZES[2], "a_along_k": True, "b_along_k": True, "aligned": True}
    given |= {"a_code": CODES[0], "b_code": CODES[1], "scaling": "tensor", "dtype": torch.uint8, "epilogue": "none"}
    problem = gemm_plans.Problem(**given)
    kind, described, default = gemm_plans.choice_of(problem, HOPPER)
    assert default.constants["BLOCK_M"] != 64
    keep(kernel=f"{kind}_described" if described else kind)
    assert gemm_plans.choice_of(problem, HOPPER)[2].constants == ENTRY["constants"]
    assert gemm_plans.choice_of(problem, HOPPER, tuned=False)[2] == default


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 0, "entries": {}}', '{"format": 1}', "[" * 100_000,
     '{"format": 1, "entries": {"k": {}}}',
     '{"format": 1, "entries": {"k": {"constants": 3, "num_warps": 4, "num_stages": 2, "options": {}}}}'],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_ignored_once_with_a_warning(cache: Path, text: str) -> None:
    cache.write_text(text)
    with pytest.warns(tuning.TuningCacheWarning, match="ignored, because it cannot be read.*te-dispatch tune"):
        assert found() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found() is None  # read once
        keep()
        assert found() is not None
    assert json.loads(cache.read_text())["format"] == 1


def test_a_file_of_a_newer_release_is_left_alone(cache: Path) -> None:
    text = '{"format": 99, "entries": {}}'
    cache.write_text(text)
    with pytest.raises(OSError, match=r"a newer te_dispatch wrote it \(format 99.*TE_DISPATCH_CACHE_DIR"):
        keep()
    assert cache.read_text() == text


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"num_warps": -4}, "num_warps is -4"),
        ({"num_warps": True}, "num_warps is True"),
        ({"num_warps": 6}, "power of two"),
        ({"num_stages": -1}, "num_stages is -1"),
        ({"constants": {"BLOCK_Q": 64}}, "unknown constant 'BLOCK_Q'"),
        ({"constants": {"BLOCK_M": None}}, "BLOCK_M is None"),
    ],
)
def test_an_entry_that_no_kernel_takes_is_refused(cache: Path, changed: dict[str, Any], problem: str) -> None:
    keep()
    data = json.loads(cache.read_text())
    next(iter(data["entries"].values())).update(changed)
    cache.write_text(json.dumps(data))
    with pytest.warns(tuning.TuningCacheWarning, match=problem):
        assert found() is None


def test_a_folder_that_cannot_be_written_is_an_error_of_the_tuner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tuning_cache.DIRECTORY, str(tmp_path / "file" / "below"))
    tuning.forget()
    with pytest.warns(tuning.TuningCacheWarning):
        assert found() is None
    with pytest.raises(OSError, match="file"):
        tuning_cache.write(tuning.cache_file(), {})


def _writer(path: str, name: str) -> None:
    for i in range(20):
        tuning_cache.write(Path(path), {f"{name} {i}": ENTRY})


@pytest.mark.slow
def test_readers_never_see_half_a_file(cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_writer, args=(str(cache), name)) for name in "ab"]
    for writer in writers:
        writer.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(writer.is_alive() for writer in writers):
            tuning_cache.read(cache)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(tuning_cache.read(cache)) == 40, "and none of them takes away what the other has added"


def test_a_machine_without_the_device_hears_so(cache: Path) -> None:
    calls, seen = [{"m": 1, "n": 1, "k": 1, "layout": "NT"}] * 2, []
    rows = tuning.tune(calls, device=99, done=lambda place, row: seen.append(place))
    assert [row["problem"] for row in rows] == ["PyTorch sees no device 99"] * 2
    assert seen == [0, 1] and not cache.exists()


def test_the_command_finds_the_tuner() -> None:
    assert tuning.OPERATORS == ("gemm",)
    assert callable(tuning.tune) and callable(tuning.cache_file)
