# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tensor-scaled casts of the cuda backend, where the conformance kit's calls do not reach: more tensors than one launch
takes, records that do not lie dense, graphs whose operands change, matrices beyond 2^31 elements.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer, Quantizer

native = pytest.importorskip("te_dispatch_cuda.quantize")
activation = pytest.importorskip("te_dispatch_cuda.activation")
portable = pytest.importorskip("te_dispatch_torch.quantize")
state = pytest.importorskip("te_dispatch_torch.state")

DEVICE = torch.device("cuda", 0)
COPIES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(17)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def delayed(scale: float = 3.0) -> DelayedQuantizer:
    return DelayedQuantizer(scale=torch.full((1,), scale, device=DEVICE), amax=torch.zeros(1, device=DEVICE))


def assert_same(a: Quantized, b: Quantized) -> None:
    for name in COPIES:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        assert left is None or torch.equal(left, right), name


@pytest.mark.parametrize("quantizer", [delayed, CurrentQuantizer], ids=["delayed", "current"])
@pytest.mark.parametrize("skipped", [False, True])
def test_a_record_that_does_not_lie_dense_is_written(quantizer: Any, skipped: bool) -> None:
    x = random(96, 80)
    wide = torch.full((96, 160), 7, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((4,), 9.0, device=DEVICE)
    out = Quantized(
        wide[:, ::2], torch.full((96, 80), 7, dtype=torch.uint8, device=DEVICE).t(), scales[1:2], scales[3:],
        "e4m3fn", "tensor", CANONICAL_SCALES, (96, 80), x.dtype, DEVICE,
    )  # fmt: skip
    flag = torch.full((1,), float(skipped), device=DEVICE)
    assert native.quantize(x, quantizer(), usage="both", out=out, noop_flag=flag) is out
    if skipped:
        assert out.row_data is not None and out.col_data is not None
        assert (out.row_data == 7).all() and (out.col_data == 7).all() and (scales == 9.0).all()
    else:
        assert_same(out, portable.quantize(x, quantizer(), usage="both"))
        assert scales[0] == scales[2] == 9.0
    assert (wide[:, 1::2] == 7).all()


@pytest.mark.parametrize("quantizer", [delayed, CurrentQuantizer], ids=["delayed", "current"])
def test_rows_of_a_wider_matrix(quantizer: Any) -> None:
    wide = random(300, 512)
    for x in (wide[:, 64:320], wide[:, 3:200], wide[::2], wide[5], wide.t()):
        assert_same(native.quantize(x, quantizer(), usage="both"), portable.quantize(x, quantizer(), usage="both"))


def graph_of(call: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph, result


@pytest.mark.parametrize("shape", [(512, 768), (33, 65)])
def test_a_graph_of_casts_that_overlap(shape: tuple[int, int]) -> None:
    """Kernels of one call start before their predecessors are done (common/launch.cuh), in graphs too."""
    x, dy = random(*shape), random(*shape)
    current = CurrentQuantizer()

    def call() -> Any:
        found = native.quantize_dbias(x, current, usage="both")
        return found, activation.activation_bwd(dy, x, kind="gelu", quantizer=current, usage="both", with_dbias=True)

    graph, captured = graph_of(call)
    for factor in (1.0, 100.0, 0.01):
        x.copy_(random(*shape) * factor)
        dy.copy_(random(*shape) * factor)
        for _ in range(20):
            graph.replay()
        expected = call()
        for a, b in zip(captured, expected, strict=True):
            torch.cuda.synchronize()
            assert torch.equal(a.dbias, b.dbias)
        assert_same(captured[0].quantized, expected[0].quantized)
        assert_same(captured[1].dx_quantized, expected[1].dx_quantized)
        assert_same(captured[0].quantized, portable.quantize(x, current, usage="both"))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_more_histories_than_one_launch_takes(algorithm: str) -> None:
    shapes = [(1, 3), (5, 40), (1030, 7), (130, 1)] * 20
    histories = [torch.rand(shape, device=DEVICE) for shape in shapes]
    for history in histories[::3]:
        history[0, 0] = 0.0
    scales = [torch.ones(shape[1], device=DEVICE) for shape in shapes]
    maxima = [[(448.0, 57344.0)[i % 2] for i in range(shape[1])] for shape in shapes]
    copies = [[t.clone() for t in tensors] for tensors in (histories, scales)]
    native.update_delayed_scales(histories, scales, maxima, algorithm=algorithm, margin=1)
    state.update_delayed_scales(*copies, maxima, algorithm=algorithm, margin=1)
    for found, expected in zip((*histories, *scales), (*copies[0], *copies[1]), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 1023, 1024, 1025, 2500])
def test_histories_of_any_length(length: int, algorithm: str) -> None:
    """Up to 1024 rows are read once, longer ones in stretches."""
    histories = [torch.rand(length, columns, device=DEVICE) for columns in (1, 9, 33)]
    histories[1][0, 3] = 0.0  # no cast happened
    histories[2][-1, 5] = 7.0
    scales = [torch.ones(history.shape[1], device=DEVICE) for history in histories]
    copies = [x.clone() for x in histories], [x.clone() for x in scales]
    maxima = [[448.0] * history.shape[1] for history in histories]
    native.update_delayed_scales(histories, scales, maxima, algorithm=algorithm)
    state.update_delayed_scales(*copies, maxima, algorithm=algorithm)
    for found, expected in zip((*histories, *scales), (*copies[0], *copies[1]), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("usage", ["row", "column"])
def test_beyond_31_bits(usage: str) -> None:
    rows, columns = 2**17 + 3, 2**14 + 16
    if torch.cuda.mem_get_info()[0] < 9 * rows * columns // 2:
        pytest.skip("needs 10 GB")
    x = torch.zeros((rows, columns), dtype=torch.bfloat16, device=DEVICE)
    x[-1] = random(columns)
    quantizer: Quantizer = delayed()
    found = native.quantize(x, quantizer, usage=usage)
    expected = portable.quantize(x[-1:].clone(), delayed(), usage="row").row_data
    codes = found.row_data[-1] if usage == "row" else found.col_data[:, -1]
    assert torch.equal(codes, expected[0])
    assert quantizer.amax is not None and quantizer.amax.item() == x[-1].abs().max().item()
