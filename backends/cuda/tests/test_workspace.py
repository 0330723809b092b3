# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The workspace that prepared calls keep: one for each stream, and none where it could be wrong.

Without a GPU: memory is the host's, and the native call has nothing to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_dispatch_cuda import probe

DEVICE = torch.device("cuda", 0)
KIB, MIB = 1 << 10, 1 << 20
pytestmark = pytest.mark.skipif(
    probe.driver_version() is not None, reason="addresses of the host would be launched with"
)


class Host:
    """Stands for PyTorch on a device: `direct` is its entry, `asked` what was allocated, as (role, bytes)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.direct: list[Any] = [self._entry, None]
        self.stream = 4096
        self.tensors: list[weakref.ref[torch.Tensor]] = []

    def _entry(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._made("direct", torch.empty_strided(shape, strides, dtype=dtype))

    def empty(self, role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == DEVICE
        return self._made(role, torch.empty(shape, dtype=dtype))

    def _made(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes:  # the output has none
            self.asked.append((role, tensor.nbytes))
            self.tensors.append(weakref.ref(tensor))
        return tensor

    def asks(self, call: Any) -> list[tuple[str, int]]:
        self.asked.clear()
        call(None)
        return list(self.asked)


@pytest.fixture
def host(native: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    from te_dispatch_cuda import memory, prepared

    host = Host()
    monkeypatch.setattr(memory, "stream_of", lambda index: host.stream)
    monkeypatch.setattr(memory, "direct", host.direct)
    monkeypatch.setattr(memory, "empty", host.empty)
    prepared.release_workspaces()
    yield host
    prepared.release_workspaces()


def call_with(*sizes: int, dtype: torch.dtype = torch.uint8, multiple: int = 1) -> Any:
    """A call with so many pieces of workspace, at most two; it does nothing unless all are multiples of `multiple`."""
    from te_dispatch_cuda import prepared

    out = prepared.Made("out", (0, 8), torch.float32)
    pieces = [prepared.Made("workspace", (size,), dtype) for size in sizes]
    first, second = (pieces + [0, 0])[:2]  # type: ignore[operator]
    arguments = (prepared.Given(0), second, 0, 4096, out, first, 0, 8, 0.5, 0, 0)
    aligned = [(piece, multiple) for piece in pieces]
    return prepared.prepare("dropout_add_fwd", DEVICE, arguments, out, tensors=1, aligned=aligned)


def test_calls_share_one_workspace(host: Host) -> None:
    assert host.asks(call_with(100)) == [("workspace", 256 * KIB)]
    for call in (call_with(100), call_with(64 * KIB, dtype=torch.float32), call_with(100 * KIB, 150 * KIB)):
        assert host.asks(call) == []


def test_every_piece_has_a_place_of_its_own(host: Host) -> None:
    assert call_with(1, 1, multiple=16)(None) is not NotImplemented
    assert call_with(1, multiple=1 << 40)(None) is NotImplemented  # an address that is such a multiple would be null
    host.asks(call_with(128 * KIB, 128 * KIB))
    assert host.asks(call_with(128 * KIB, 128 * KIB + 1)) == [("workspace", 512 * KIB)]


def test_it_grows_and_frees_the_smaller(host: Host) -> None:
    host.asks(call_with(1))
    call = call_with(3 * MIB)
    assert host.asks(call) == [("workspace", 4 * MIB)]
    assert [tensor() is None for tensor in host.tensors] == [True, False]
    assert host.asks(call) == [] and host.asks(call_with(1)) == []


def test_large_workspace_is_not_kept(host: Host) -> None:
    call = call_with(8 * MIB + 1)
    assert host.asks(call) == host.asks(call) == [("direct", 8 * MIB + 1)]
    assert all(tensor() is None for tensor in host.tensors)


def test_another_allocator_sees_every_piece(host: Host) -> None:
    call = call_with(100, 50)
    host.asks(call)
    host.direct[0] = None
    assert host.asks(call) == [("workspace", 50), ("workspace", 100)]


def test_on_another_current_device_none_is_kept(host: Host) -> None:
    call = call_with(100)
    host.direct[1] = lambda: 1
    assert host.asks(call) == host.asks(call) == [("workspace", 100)]


def test_streams_have_workspace_of_their_own(host: Host) -> None:
    from te_dispatch_cuda import prepared

    call = call_with(100)
    for host.stream in range(1, 9):
        assert host.asks(call) == [("workspace", 256 * KIB)]
    assert [host.asks(call) for host.stream in range(1, 9)] == [[]] * 8
    host.stream = 9
    assert host.asks(call) == [("workspace", 256 * KIB)]
    assert [tensor() is None for tensor in host.tensors] == [True] * 8 + [False]
    assert prepared.release_workspaces() == 256 * KIB
    assert host.tensors[-1]() is None


def test_errors_pass_through_and_leave_nothing_wrong(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    from te_dispatch_cuda import memory

    def fail(*args: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(memory, "empty", fail)
    call = call_with(100)
    monkeypatch.setattr(memory, "empty", host.empty)
    with pytest.raises(MemoryError, match="no room"):
        call(None)
    assert host.asks(call_with(100)) == [("workspace", 256 * KIB)]


def test_workspace_is_no_result(host: Host) -> None:
    from te_dispatch_cuda import prepared

    workspace = prepared.Made("workspace", (1,), torch.uint8)
    arguments = (prepared.Given(0), 0, 0, 4096, 0, workspace, 0, 8, 0.5, 0, 0)
    with pytest.raises(ValueError, match="dropout_add_fwd: the result names workspace"):
        prepared.prepare("dropout_add_fwd", DEVICE, arguments, workspace, tensors=1)
