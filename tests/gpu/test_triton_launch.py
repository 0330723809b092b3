# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Launches of the triton backend on a device: short ones equal Triton's own, captures, and what tuning keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

launch = pytest.importorskip("te_dispatch_triton.launch")
training = pytest.importorskip("te_dispatch_triton.training")

from te_dispatch.core.errors import CaptureError  # noqa: E402

DEVICE = torch.device("cuda")


def halved(dy: torch.Tensor) -> torch.Tensor:
    """A call of one kernel: dy without the second half of every pair, doubled."""
    mask = (torch.arange(dy.numel(), device=dy.device) % 2 == 0).view(dy.shape).to(torch.uint8)
    return training.dropout_add_bwd(dy, mask, dropout_p=0.5)


def expected(dy: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(dy.numel(), device=dy.device).view(dy.shape) % 2 == 0, dy * 2, 0)


def test_every_kind_of_call_gets_its_own_binary() -> None:
    """Alignments and sizes in an order in which a wrong key would launch what was compiled for another call."""
    memory = torch.randn(2**17, device=DEVICE)
    for start, count in ((0, 4096), (1, 4096), (0, 4095), (3, 1), (4, 16), (0, 1), (2, 4096), (0, 65536), (1, 65537)):
        dy = memory[start : start + count].view(1, -1)
        for _ in range(2):
            assert torch.equal(halved(dy), expected(dy)), (start, count)


def test_tensors_beyond_32_bits_of_elements(room: Any) -> None:
    room(24)
    dy = torch.ones(2**31 + 5, dtype=torch.float16, device=DEVICE).view(1, -1)
    mask = torch.zeros(dy.shape, dtype=torch.uint8, device=DEVICE)
    mask[0, -3:] = 1
    dx = training.dropout_add_bwd(dy, mask, dropout_p=0.5)
    assert dx[0, -5:].tolist() == [0, 0, 2, 2, 2] and int(dx.count_nonzero()) == 3


def test_work_goes_on_the_current_stream() -> None:
    dy, stream = torch.randn(4096, 4096, device=DEVICE), torch.cuda.Stream()
    for _ in range(3):  # what compiles or loads, and the call that is recorded, takes its time
        halved(torch.full_like(dy, 2.0))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # about a second: a busy host takes its time
        filled = torch.full_like(dy, 3.0)
        found = halved(filled)
    assert not stream.query()  # it waits behind the sleep
    stream.synchronize()
    assert torch.equal(found, expected(torch.full_like(dy, 3.0)))


def test_a_capture_replays_and_refuses_what_is_not_compiled() -> None:
    x = torch.randn(512, 512, device=DEVICE)
    mask = torch.ones(x.shape, dtype=torch.uint8, device=DEVICE)
    training.dropout_add_bwd(x, mask, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx = training.dropout_add_bwd(x, mask, dropout_p=0.5)
        with pytest.raises(CaptureError, match="make the same call once before the capture"):
            training.dropout_add_bwd(x.double().to(torch.float16), mask, dropout_p=0.75)
        again = training.dropout_add_bwd(dx, mask, dropout_p=0.5)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(dx, x * 2) and torch.equal(again, x * 4)


def test_lists_of_tensors_are_captured() -> None:
    params, grads, moments, squares = (
        [torch.randn(1000 + i, device=DEVICE).abs() for i in range(50)] for _ in range(4)
    )
    alone = [[x.clone() for x in tensors] for tensors in (params, grads, moments, squares)]
    training.multi_tensor_adam(*alone, lr=0.1, step=2)
    training.multi_tensor_l2norm(grads, per_tensor=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.multi_tensor_adam(params, grads, moments, squares, lr=0.1, step=2)
        norms = training.multi_tensor_l2norm(grads, per_tensor=True)
    graph.replay()
    torch.cuda.synchronize()
    for tensors, others in zip((params, moments, squares), (alone[0], alone[2], alone[3])):
        assert all(map(torch.equal, tensors, others))
    torch.testing.assert_close(norms, torch.stack([x.norm() for x in grads]))


def test_a_profilers_hooks_are_called() -> None:
    from triton import knobs

    hook = knobs.runtime.launch_enter_hook
    if not hasattr(hook, "add"):
        pytest.skip("this Triton has no chains of hooks")
    dy, seen = torch.randn(64, 64, device=DEVICE), []
    halved(dy)
    note = lambda metadata: seen.append(metadata)  # noqa: E731
    hook.add(note)
    try:
        assert torch.equal(halved(dy), expected(dy))
    finally:
        hook.remove(note)
    assert len(seen) == 1
    halved(dy)
    assert len(seen) == 1


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    tuning = pytest.importorskip("te_dispatch_triton.tuning")
    monkeypatch.setenv("TE_DISPATCH_CACHE_DIR", str(tmp_path))
    tuning.forget()
    yield tuning
    monkeypatch.delenv("TE_DISPATCH_CACHE_DIR")
    tuning.forget()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tuning_keeps_a_winner_that_changes_no_bit(cache: Any) -> None:
    from te_dispatch_triton import gemm, tuning_cache

    a, b = (torch.randn(1024, 1024, device=DEVICE).bfloat16() for _ in range(2))
    before = gemm.gemm(a, b, layout="NT").out
    (row,) = cache.tune([{"m": 1024, "n": 1024, "k": 1024, "layout": "NT"}])
    assert row["problem"] is None and row["candidates"] >= 1
    assert row["best_us"] <= row["first_us"]
    assert len(tuning_cache.entries()) == 1
    assert torch.equal(gemm.gemm(a, b, layout="NT").out, before)
