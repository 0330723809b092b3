# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Outputs through PyTorch's entry for compiled code, tried with its twin for the CPU: same code, same demands."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from te_dispatch.ops import alloc  # noqa: E402

DEVICE = SimpleNamespace(type="cuda", index=0)


@pytest.fixture
def fast(monkeypatch):
    twin = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
    if twin is None:
        pytest.skip("this PyTorch has no such entry")
    monkeypatch.setattr(alloc, "_empty_strided_cuda", twin)
    monkeypatch.setattr(alloc, "_current_cuda", lambda: 0)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 4), (0, 4), (4, 0), (2, 3, 5), (2, 0, 5, 1), (1, 1, 1)])
@pytest.mark.parametrize("kind", [tuple, torch.Size])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_outputs_are_as_torch_empty_makes_them(fast, shape, kind, dtype):
    got, expected = alloc.empty("out", kind(shape), dtype, DEVICE), torch.empty(shape, dtype=dtype)
    assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert got.is_contiguous() and not got.requires_grad


def test_another_device_than_the_current_one_is_left_to_torch_empty(fast, monkeypatch):
    monkeypatch.setattr(alloc, "_current_cuda", lambda: 1)
    monkeypatch.setattr(alloc, "_looked_up", True)
    with pytest.raises((TypeError, RuntimeError)):  # torch.empty takes no such stand-in for a device
        alloc.empty("out", (2,), torch.float32, DEVICE)
