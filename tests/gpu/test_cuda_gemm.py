# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The cuda backend's matrix products where the kit does not ask: plans, tuning, TF32, the library's casts."""

from __future__ import annotations

import inspect
import json
import warnings
from typing import Any

import pytest
import torch

import te_dispatch
from te_dispatch import ops
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer

# Without cuBLASLt on the machine they do not import.
plans = pytest.importorskip("te_dispatch_cuda.gemm_plans", exc_type=ImportError)
tuning = pytest.importorskip("te_dispatch_cuda.tuning", exc_type=ImportError)

DEVICE = torch.device("cuda")
CURRENT = CurrentQuantizer("e4m3fn")


@pytest.fixture(autouse=True)
def _on_cuda(tmp_path, monkeypatch):
    """This backend alone, and no tuned algorithms but the test's own."""
    monkeypatch.setenv("TE_DISPATCH_CACHE_DIR", str(tmp_path))
    tuning.forget()
    torch.manual_seed(0)
    with te_dispatch.using(gemm="cuda", grouped_gemm="cuda"):
        yield
    tuning.forget()


def codes(*shape: int, quantizer: Any = CURRENT) -> Any:
    return ops.quantize(torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16), quantizer, usage="both")


def test_fp32_follows_pytorch_s_setting():
    a, b = torch.randn(256, 1024, device=DEVICE), torch.randn(128, 1024, device=DEVICE)
    exact = a.double() @ b.double().t()
    before = torch.get_float32_matmul_precision()
    try:
        errors = {}
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            errors[precision] = (ops.gemm(a, b, layout="NT").out - exact).abs().max().item()
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors["highest"] < 2e-4 < 5e-3 < errors["high"] < 0.2


@pytest.mark.parametrize("k", [16, 40, 1000])
@pytest.mark.parametrize("n", [48, 50])
def test_codes_of_any_size_are_multiplied_natively(k, n):
    a, b = codes(33, k), codes(n, k)
    x, y = (ops.dequantize(record, dtype=torch.float32).double() for record in (a, b))
    found = ops.gemm(a, b, layout="NT", out_dtype=torch.float32, split_accumulator=True).out
    assert ((found - x @ y.t()).abs() <= 2.0**-10 * (x.abs() @ y.abs().t())).all()


def test_a_cast_by_the_library_is_the_cast_of_its_product():
    """An 8-bit output in one launch: its codes are those of the fp32 product, up to ties that the sums decide."""
    a, b = codes(256, 512), codes(128, 512)
    product = ops.gemm(a, b, layout="NT", out_dtype=torch.float32, split_accumulator=True).out
    for start in (0.0, 1e9):
        quantizer = DelayedQuantizer(
            "e4m3fn", scale=torch.tensor([3.0], device=DEVICE), amax=torch.tensor([start], device=DEVICE)
        )
        found = ops.gemm(a, b, layout="NT", out_quantizer=quantizer, split_accumulator=True).out
        expected = ops.quantize(product, DelayedQuantizer("e4m3fn", scale=quantizer.scale), usage="row")
        assert (found.row_data != expected.row_data).float().mean() < 1e-2
        assert torch.equal(found.row_scale_inv, expected.row_scale_inv)
        torch.testing.assert_close(quantizer.amax.item(), max(start, product.abs().max().item()), rtol=1e-3, atol=0)


def test_a_saturating_cast_saturates():
    a, b = codes(64, 256), codes(64, 256)
    quantizer = DelayedQuantizer("e4m3fn", scale=torch.tensor([1e4], device=DEVICE))
    found = ops.gemm(a, b, layout="NT", out_quantizer=quantizer).out.row_data
    assert ((found & 0x7F) <= 0x7E).all() and ((found & 0x7F) == 0x7E).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(2049, 2048), (4100, 1031), (70001, 40), (3, 1 << 20)])
def test_sums_of_an_operand_that_the_library_does_not_sum(rows, columns, dtype):
    """From some MiB on they are ours: vectors and single elements, one part and many."""
    dy = torch.randn(rows, columns, device=DEVICE).to(dtype)
    x = torch.randn(rows, 8, device=DEVICE).to(dtype)
    found = ops.gemm(dy, x, layout="TN", epilogue="bgrad_a")
    again = ops.gemm(dy, x, layout="TN", epilogue="bgrad_a")
    expected, size = dy.double().sum(0), dy.double().abs().sum(0)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11 if dtype == torch.float16 else 2.0**-24
    assert ((found.dbias - expected).abs() <= rounding * expected.abs() + 2.0**-20 * size).all()
    assert torch.equal(found.dbias, again.dbias)
    assert torch.equal(found.out, ops.gemm(dy, x, layout="TN").out)


def test_plans_are_kept_and_bounded(monkeypatch):
    a, b = torch.randn(64, 64, device=DEVICE), torch.randn(64, 64, device=DEVICE)
    ops.gemm(a, b, layout="NT")
    count = len(plans.PLANS)
    ops.gemm(a, b, layout="NT")
    assert len(plans.PLANS) == count
    monkeypatch.setattr(plans.PLANS, "capacity", count + 2)
    for m in range(1, 9):
        torch.testing.assert_close(ops.gemm(a[:m], b, layout="NT").out, a[:m] @ b.t())
    assert len(plans.PLANS) <= count + 2


def test_a_call_that_is_kept_serves_other_addresses():
    """The same kind of call with operands and outputs that lie better or worse than those it was prepared for."""
    memory = torch.randn(3, 64 * 256 + 64, device=DEVICE).bfloat16()
    b = torch.randn(128, 256, device=DEVICE).bfloat16()
    bias = torch.randn(2 * 128, device=DEVICE).bfloat16()
    for start in (0, 8, 1, 0, 3):
        a = memory[start % 3, start : start + 64 * 256].view(64, 256)
        given = bias[start : start + 128]
        expected = (a.float() @ b.float().t() + given.float()).bfloat16()
        torch.testing.assert_close(ops.gemm(a, b, layout="NT", bias=given).out, expected, rtol=2e-2, atol=2e-1)
        out = torch.empty(64 * 128 + 8, device=DEVICE, dtype=torch.bfloat16)[start : start + 64 * 128].view(64, 128)
        assert ops.gemm(a, b, layout="NT", bias=given, out=out).out is out
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-1)


def test_groups_are_their_products_bit_for_bit():
    rows = [16, 0, 48, 5]
    x, weights = (
        torch.randn(sum(rows), 128, device=DEVICE).bfloat16(),
        [torch.randn(64, 128, device=DEVICE).bfloat16() for _ in rows],
    )
    for quantizer in (None, CURRENT):
        a = x if quantizer is None else ops.quantize(x, quantizer, usage="row")
        b = weights if quantizer is None else [ops.quantize(w, quantizer, usage="row") for w in weights]
        results = ops.grouped_gemm([a], b, rows, layout="NT")
        assert [tuple(one.shape) for one in results] == [(n, 64) for n in rows]
        on_device = ops.grouped_gemm([a], b, torch.tensor(rows, device=DEVICE), layout="NT")
        for one, other in zip(results, on_device):
            assert torch.equal(one, other)


# -- tuning ------------------------------------------------------------------------------------------------------------

CALL = {"m": 256, "n": 512, "k": 1024, "layout": "NT", "a.dtype": "e4m3fn", "b.dtype": "e4m3fn", "out_dtype": "bf16"}


def test_tuning_keeps_what_calls_then_take():
    a, b = codes(256, 1024), codes(512, 1024)
    before = ops.gemm(a, b, layout="NT").out
    told: list[int] = []
    (row,) = tuning.tune([CALL], done=lambda place, row: told.append(place))
    assert told == [0] and row["problem"] is None and row["candidates"] >= 1 and row["best_us"] <= row["first_us"]
    entries = json.loads(tuning.cache_file().read_text())["entries"]
    assert len(entries) == 1
    # Another algorithm than the library's favourite, so that taking it shows.
    (key,) = entries
    plan = plans._native.gemm_plan(*_problem(a, b), None)
    other = plans._native.gemm_candidates(plan, 32)[-1]
    entries[key]["algorithm"] = other[0].hex()
    tuning.cache_file().write_text(json.dumps({"format": 1, "entries": entries}))
    tuning.forget()
    after = ops.gemm(a, b, layout="NT").out
    taken = [plan.description for plan, _ in plans.PLANS.values()]
    assert taken == [other[2]]
    torch.testing.assert_close(after, before, rtol=2e-2, atol=2e-2)


def _problem(a: Any, b: Any) -> Any:
    from te_dispatch_cuda.gemm_calls import problem_of

    return problem_of(a.row_data, b.row_data, "NT", ("e4m3fn", "e4m3fn", True), 0, 0, torch.bfloat16, False)


@pytest.mark.parametrize(
    "call",
    [
        {"m": 64, "n": 64, "k": 64, "layout": "TN"},
        {"m": 64, "n": 64, "k": 64, "layout": "NN", "a.dtype": "fp32", "b.dtype": "fp32", "bias": True},
        {**CALL, "a.scaling": "block_1d", "b.scaling": "block_2d", "split_accumulator": True},
    ],
)
def test_every_kind_of_call_can_be_tuned_and_is_found_again(call):
    if "block_1d" in call.values() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("block scales in fp32 are sm_90's")
    (row,) = tuning.tune([call])
    assert row["problem"] is None and row["candidates"] >= 1
    m, n, k, layout = call["m"], call["n"], call["k"], call["layout"]
    bias = None
    if "block_1d" in call.values():
        a, b = codes(m, k, quantizer=BlockQuantizer()), codes(n, k, quantizer=BlockQuantizer(two_d=True))
    else:
        dtype = torch.float32 if call.get("a.dtype") == "fp32" else torch.bfloat16
        a = torch.randn((k, m) if layout[0] == "T" else (m, k), device=DEVICE, dtype=dtype)
        b = torch.randn((n, k) if layout[1] == "T" else (k, n), device=DEVICE, dtype=dtype)
        bias = torch.randn(n, device=DEVICE, dtype=dtype) if call.get("bias") else None
    asked: list[str] = []
    keys = set(json.loads(tuning.cache_file().read_text())["entries"])
    original = tuning.key_of
    tuning.key_of = lambda problem: asked.append(original(problem)) or asked[-1]  # type: ignore[func-returns-value]
    try:
        ops.gemm(a, b, layout=layout, bias=bias)
    finally:
        tuning.key_of = original
    assert set(asked) == keys


def test_what_the_library_refuses_is_a_row_with_its_status():
    (row,) = tuning.tune([{**CALL, "a.dtype": "e5m2", "b.dtype": "e5m2"}])
    assert row["candidates"] == 0 and "not supported" in row["problem"]


def test_a_corrupt_cache_is_warned_of_once_and_replaced():
    tuning.cache_file().write_text("{")
    tuning.forget()
    a, b = codes(64, 64), codes(64, 64)
    with pytest.warns(tuning.TuningCacheWarning):
        ops.gemm(a, b, layout="NT")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.gemm(a, codes(32, 64), layout="NT")
    tuning.tune([CALL])
    assert len(json.loads(tuning.cache_file().read_text())["entries"]) == 1


def test_tuning_under_capture_is_refused():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="captured"):
        tuning.tune([CALL])


def test_a_new_plan_under_capture_only_launches():
    """No allocation outside the pool and no synchronization: replays give the eager result."""
    a, b = codes(80, 144), codes(48, 144)
    out = torch.empty(80, 48, device=DEVICE, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.gemm(a, b, layout="NT", out=out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, ops.gemm(a, b, layout="NT").out)


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_a_repeated_product_of_blocks_is_the_product(layout):
    gemm = pytest.importorskip("te_dispatch_cuda.gemm")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuBLASLt multiplies blocks on sm_90")

    def operands() -> list[Any]:
        flat, tiles = BlockQuantizer("e4m3fn"), BlockQuantizer("e4m3fn", two_d=True)
        return [codes(256, 256, quantizer=flat), codes(256, 256, quantizer=flat if layout == "TN" else tiles)]

    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    (a, b), (c, d) = operands(), operands()
    defaults = {p.name: p.default for p in inspect.signature(ops.gemm).parameters.values()}
    given = {**defaults, "a": a, "b": b, "layout": layout, "out_dtype": torch.float32}
    gemm.gemm_codes(a, b, layout=layout, out_dtype=torch.float32)
    repeated = gemm.gemm_codes.plans.repeat(("a", "b"), **given)
    assert repeated is not None
    expected = ops.gemm(c, d, layout=layout, out_dtype=torch.float32).out
    assert expected.any() and torch.equal(repeated(c, d).out, expected)
    c.row_scale_inv, c.col_scale_inv = moved(c.row_scale_inv), moved(c.col_scale_inv)
    assert c.row_scale_inv.data_ptr() % 16 and torch.equal(repeated(c, d).out, expected)


@pytest.mark.parametrize(("layout", "epilogue"), [("TN", "bgrad_a"), ("TN", "bgrad_b"), ("NN", "bgrad_b")])
@pytest.mark.parametrize("columns", [256, 8192])
def test_a_repeated_product_with_sums_is_the_product(layout, epilogue, columns):
    """Sums of the library, and of operands that it does not sum."""
    gemm = pytest.importorskip("te_dispatch_cuda.gemm")

    def operands() -> list[torch.Tensor]:
        shapes = ((512, columns), (512, 64)) if epilogue == "bgrad_a" else ((512, 512), (512, columns))
        return [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes]

    (a, b), (c, d) = operands(), operands()
    defaults = {p.name: p.default for p in inspect.signature(ops.gemm).parameters.values()}
    gemm.gemm(a, b, layout=layout, epilogue=epilogue)
    repeated = gemm.gemm.plans.repeat(
        ("a", "b"), **{**defaults, "a": a, "b": b, "layout": layout, "epilogue": epilogue}
    )
    assert repeated is not None
    found, expected = repeated(c, d), ops.gemm(c, d, layout=layout, epilogue=epilogue)
    assert expected.dbias is not None and expected.dbias.any()
    assert torch.equal(found.out, expected.out) and torch.equal(found.dbias, expected.dbias)
