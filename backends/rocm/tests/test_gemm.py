# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products on the host library, compared with float64; and what the library refuses."""

from __future__ import annotations

import math
import subprocess

import pytest
import torch

from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import CurrentQuantizer, MXFP8Quantizer
from te_dispatch_reference.quantize import dequantize, quantize, relayout_scales

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Chip -> the encodings that it multiplies.
ENCODINGS = {"gfx942": ("e4m3fnuz", "e5m2fnuz"), "gfx950": ("e4m3fn", "e5m2"), "gfx1201": ("e4m3fn", "e5m2")}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def shapes(m: int, n: int, k: int, layout: str) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((k, m) if layout[0] == "T" else (m, k)), ((n, k) if layout[1] == "T" else (k, n))


def product(a: torch.Tensor, b: torch.Tensor, layout: str) -> torch.Tensor:
    """In float64."""
    a, b = a.double(), b.double()
    return (a.t() if layout[0] == "T" else a) @ (b.t() if layout[1] == "T" else b)


def close(found: torch.Tensor, expected: torch.Tensor, a=None) -> None:
    """Within the rounding of found's dtype, and of fp32 sums."""
    epsilon = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=2 * epsilon, atol=1e-4)


def run(made):
    """The result of a host function that was called past its cache of launches."""
    return made.run() if hasattr(made, "run") else made


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_products(modules, dtype, layout):
    a, b = (torch.randn(shape).to(dtype) for shape in shapes(24, 40, 56, layout))
    result = modules.gemm.gemm(a, b, layout=layout)
    assert result.aux is None and result.dbias is None and result.out.dtype == dtype
    close(result.out, product(a, b, layout))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_alpha_bias_accumulate_and_outputs_in_fp32(modules, dtype):
    a, b = (torch.randn(shape).to(dtype) for shape in shapes(24, 40, 56, "NT"))
    bias, out = torch.randn(40).to(dtype), torch.randn(24, 40)
    before = out.double()
    result = modules.gemm.gemm(a, b, layout="NT", alpha=0.5, bias=bias, out=out, accumulate=True)
    assert result.out is out
    close(out, product(a, b, "NT") * 0.5 + bias.double() + before)


def test_leading_dimensions_flatten(modules):
    a, b = torch.randn(2, 3, 8), torch.randn(5, 8)
    result = modules.gemm.gemm(a, b, layout="NT")
    assert result.out.shape == (2, 3, 5)
    close(result.out, a.double() @ b.double().t())


def test_operands_with_gaps_at_odd_places_and_outputs_with_gaps(modules):
    a = torch.randn(24, 64)[:, 3:59]
    b = torch.randn(40 * 56 + 1)[1:].view(40, 56)
    out = torch.zeros(24, 80)[:, ::2]
    result = modules.gemm.gemm(a, b, layout="NT", out=out)
    assert result.out is out
    close(out, product(a, b, "NT"))


def test_a_bias_that_the_library_does_not_take_is_given_in_fp32(modules):
    a, b = (torch.randn(shape).bfloat16() for shape in shapes(24, 40, 56, "NT"))
    plans = modules.gemm.gemm.plans
    before = plans.hits
    for _ in range(2):
        bias = torch.randn(40).half()
        close(modules.gemm.gemm(a, b, layout="NT", bias=bias).out, product(a, b, "NT") + bias.double())
    assert plans.hits == before + 1


def test_a_bias_that_the_library_does_not_take_at_all(modules, monkeypatch):
    """Added to a result in fp32, and declined where it would be rounded in between."""
    monkeypatch.setenv("HOST_HIPBLASLT_REFUSE", "bias")
    a, b = (torch.randn(shape).bfloat16() for shape in shapes(24, 40, 56, "NT"))
    bias, out = torch.randn(40).bfloat16(), torch.ones(24, 40)
    modules.gemm.gemm(a, b, layout="NT", bias=bias, out=out, accumulate=True)
    close(out, product(a, b, "NT") + bias.double() + 1)
    (grouped,) = modules.grouped.grouped_gemm([a], [b], layout="NT", bias=[bias], out_dtype=torch.float32)
    close(grouped, product(a, b, "NT") + bias.double())
    with pytest.raises(Declined, match="no algorithm for this product with a bias"):
        modules.gemm.gemm(a, b, layout="NT", bias=bias)


@pytest.mark.parametrize("refused", ["", "bias"])
def test_results_require_no_gradient_whatever_operands_do(modules, monkeypatch, refused):
    """Also where the bias is added, or is all of the result."""
    monkeypatch.setenv("HOST_HIPBLASLT_REFUSE", refused)
    x, weight = (torch.randn(shape).requires_grad_() for shape in shapes(24, 40, 56, "NT"))
    bias = torch.randn(40).requires_grad_()
    outs = [torch.zeros(rows, 40) for rows in (24, 0)]
    found = modules.grouped.grouped_gemm([x], [weight] * 2, [24, 0], layout="NT", bias=[bias] * 2, out=outs)
    single = [modules.gemm.gemm(x[:rows], weight, layout="NT", bias=bias).out for rows in (24, 0)]
    assert not any(one.requires_grad for one in (*found, *single))
    close(outs[0], (product(x, weight, "NT") + bias.double()).detach())


@pytest.mark.parametrize("biased", [False, True])
def test_gelu_and_its_input(modules, biased):
    a, b = (torch.randn(shape).bfloat16() for shape in shapes(24, 40, 56, "NT"))
    bias = torch.randn(40).bfloat16() if biased else None
    result = modules.gemm.gemm(a, b, layout="NT", bias=bias, epilogue="gelu")
    z = product(a, b, "NT") + (bias.double() if biased else 0)
    close(result.aux, z)
    close(result.out, torch.nn.functional.gelu(z, approximate="tanh"))


def test_the_derivative_of_gelu_and_its_column_sums(modules):
    a, b = (torch.randn(shape).bfloat16() for shape in shapes(24, 40, 56, "NN"))
    aux = torch.randn(24, 40).bfloat16()
    result = modules.gemm.gemm(a, b, layout="NN", epilogue="dgelu", aux=aux)
    z = aux.double().requires_grad_()
    torch.nn.functional.gelu(z, approximate="tanh").backward(product(a, b, "NN"))
    close(result.out, z.grad)
    torch.testing.assert_close(result.dbias.double(), z.grad.sum(0), rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("epilogue", ["bgrad_a", "bgrad_b"])
def test_sums_of_an_operand(modules, epilogue):
    a, b = (torch.randn(shape).bfloat16() for shape in shapes(24, 40, 56, "TN"))
    result = modules.gemm.gemm(a, b, layout="TN", epilogue=epilogue)
    close(result.out, product(a, b, "TN"))
    summed = (a if epilogue == "bgrad_a" else b).double().sum(0)
    torch.testing.assert_close(result.dbias.double(), summed, rtol=2**-7, atol=2**-6)


def test_a_weight_gradient_in_fp32_with_a_bias_gradient_is_declined(modules):
    a, b = (torch.randn(shape).bfloat16() for shape in shapes(24, 40, 56, "TN"))
    with pytest.raises(Declined, match="hipBLASLt has no algorithm for this product: not supported"):
        modules.gemm.gemm(a, b, layout="TN", epilogue="bgrad_a", out_dtype=torch.float32)


@pytest.mark.parametrize("sizes", [(0, 16, 16), (16, 0, 16), (16, 32, 0)])
def test_products_of_nothing(modules, sizes):
    m, n, k = sizes
    a, b = (torch.randn(shape) for shape in shapes(m, n, k, "NT"))
    bias, out = torch.randn(n), torch.ones(m, n)
    result = modules.gemm.gemm(a, b, layout="NT", bias=bias, out=out, accumulate=True)
    assert result.out is out
    torch.testing.assert_close(out, bias.expand(m, n) + 1)
    torch.testing.assert_close(modules.gemm.gemm(a, b, layout="NT").out, torch.zeros(m, n))
    with pytest.raises(Declined, match="gelu"):
        modules.gemm.gemm(a, b, layout="NT", epilogue="gelu")


# -- FP8 -------------------------------------------------------------------------------------------------------------


def record(rows: int, columns: int, encoding: str, usage: str = "both", quantizer=CurrentQuantizer) -> Quantized:
    return quantize(torch.randn(rows, columns), quantizer(encoding), usage=usage)


def values(x: Quantized, column: bool = False) -> torch.Tensor:
    """float64 values of a copy."""
    if not column:
        return dequantize(x, dtype=torch.float32).double()
    other = Quantized(
        None, x.col_data, None, x.col_scale_inv, x.encoding, x.scaling, x.scale_layout, x.shape, x.dtype, x.device
    )  # fmt: skip
    return dequantize(other, dtype=torch.float32).double()


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("chip", ENCODINGS)
def test_fp8_in_the_chip_s_encoding(modules, chip, layout):
    modules.use(chip)
    e4m3, e5m2 = ENCODINGS[chip]
    for left, right in ((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2)):
        a, b = (record(*shape, kind) for shape, kind in zip(shapes(32, 48, 64, layout), (left, right)))
        bias = torch.randn(48).bfloat16()
        result = modules.gemm.gemm_codes(a, b, layout=layout, bias=bias, out_dtype=torch.bfloat16)
        close(result.out, product(values(a), values(b), layout) + bias.double())


@pytest.mark.parametrize("usage", ["row", "column"])
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_fp8_with_one_copy_whichever_it_is(modules, layout, usage):
    a, b = (record(*shape, "e4m3fnuz", usage) for shape in shapes(32, 48, 64, layout))
    result = modules.gemm.gemm_codes(a, b, layout=layout, out_dtype=torch.float32)
    close(result.out, product(values(a), values(b), layout))


@pytest.mark.parametrize(
    ("chip", "encoding", "said"),
    [
        ("gfx942", "e4m3fn", "a is e4m3fn, gfx942 multiplies e4m3fnuz and e5m2fnuz"),
        ("gfx950", "e4m3fnuz", "a is e4m3fnuz, gfx950 multiplies e4m3fn and e5m2"),
        ("gfx90a", "e4m3fn", "a is e4m3fn, gfx90a has no FP8 units"),
    ],
)
def test_the_other_flavour_is_refused_with_both_tags(modules, chip, encoding, said):
    modules.use(chip)
    x = record(16, 32, encoding)
    with pytest.raises(Declined, match=said):
        modules.gemm.gemm_codes(x, x, layout="NT")


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_block_scales_on_gfx950(modules, layout):
    modules.use("gfx950")
    a, b = (record(*shape, "e4m3fn", quantizer=MXFP8Quantizer) for shape in shapes(32, 64, 96, layout))
    result = modules.gemm.gemm_codes(a, b, layout=layout, out_dtype=torch.float32)
    columns = layout[0] == "T", layout[1] == "N"
    close(result.out, product(values(a, columns[0]), values(b, columns[1]), layout))


def test_block_scales_need_their_copy_in_the_canonical_layout(modules):
    modules.use("gfx950")
    a, b = (record(32, 64, "e4m3fn", "row", MXFP8Quantizer) for _ in range(2))
    with pytest.raises(Declined, match="b has no column-wise copy"):
        modules.gemm.gemm_codes(a, record(64, 32, "e4m3fn", "row", MXFP8Quantizer), layout="NN")
    with pytest.raises(Declined, match="b has scales in layout swizzled_32x4x4"):
        modules.gemm.gemm_codes(a, relayout_scales(b, scale_layout="swizzled_32x4x4"), layout="NT")


# -- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_made_once_for_each_problem(modules, monkeypatch):
    asked = []
    monkeypatch.setattr(modules.tuning, "algorithm_for", lambda problem: asked.append(problem))
    a, b = torch.randn(16, 32), torch.randn(24, 32)
    for _ in range(3):  # past the cache of launches, which is on top
        run(modules.gemm.gemm.plans.function(a, b, layout="NT"))
    assert len(asked) == 1
    run(modules.gemm.gemm.plans.function(a, b, layout="NT", accumulate=True, out=torch.zeros(16, 24)))
    assert len(asked) == 2
    hits, misses, size, capacity, evictions = modules.native.gemm_statistics()
    assert (hits, misses, size, evictions) == (2, 2, 2, 0) and capacity > 100


def test_launches_are_kept_by_signature_and_address(modules):
    plans = modules.gemm.gemm.plans
    memory = torch.randn(24 * 40 + 1)
    b = torch.randn(16, 40)
    before = plans.hits
    for start in (0, 0, 1):
        a = memory[start : start + 24 * 40].view(24, 40)
        close(modules.gemm.gemm(a, b, layout="NT").out, product(a, b, "NT"))
    assert plans.hits == before + 1


def test_scales_may_be_of_any_four_bytes(modules):
    """As those of many tensors that were cast at once are."""
    plans = modules.gemm.gemm_codes.plans
    before, scales = plans.hits, torch.empty(3)
    a, b = record(32, 64, "e4m3fnuz"), record(48, 64, "e4m3fnuz")
    expected = product(values(a), values(b), "NT")
    scales[1:2] = a.row_scale_inv
    a.row_scale_inv = scales[1:2]
    for _ in range(2):
        close(modules.gemm.gemm_codes(a, b, layout="NT", out_dtype=torch.float32).out, expected)
    assert plans.hits == before + 1


def test_tf32_is_asked_for_where_pytorch_allows_it_and_not_where_gfx950_drops_alpha(modules, monkeypatch):
    seen = []
    make = modules.plans.plan_of
    monkeypatch.setattr(modules.gemm, "plan_of", lambda problem: seen.append(problem) or make(problem))
    monkeypatch.setattr(modules.gemm, "allows_tf32", lambda: True)
    a, b = torch.randn(16, 32), torch.randn(24, 32)
    for chip, accumulate in (("gfx942", False), ("gfx942", True), ("gfx950", False), ("gfx950", True)):
        modules.use(chip)
        out = torch.zeros(16, 24)
        modules.gemm.gemm.plans.function(a, b, layout="NT", out=out, accumulate=accumulate)
    assert [one.tf32 for one in seen] == [True, True, True, False]


def test_where_there_is_no_tf32_fp32_is_multiplied(modules, monkeypatch):
    monkeypatch.setenv("HOST_HIPBLASLT_REFUSE", "tf32")
    monkeypatch.setattr(modules.gemm, "allows_tf32", lambda: True)
    a, b = torch.randn(17, 33), torch.randn(25, 33)
    close(modules.gemm.gemm(a, b, layout="NT").out, product(a, b, "NT"))


def test_a_failure_of_the_library_is_an_error_and_no_decline(modules, monkeypatch):
    monkeypatch.setenv("HOST_HIPBLASLT_FAIL", "1")
    with pytest.raises(RuntimeError, match=r"hipblasLtMatmul: execution failed \(5\)"):
        modules.gemm.gemm(torch.randn(16, 32), torch.randn(24, 32), layout="NT")


# -- what crosses into native code -----------------------------------------------------------------------------------

GOOD = {
    "device": 0, "m": 16, "n": 24, "k": 32, "a_turned": False, "b_turned": True, "lda": 32, "ldb": 32, "a_type": 0,
    "b_type": 0, "scaling": 0, "out_type": 0, "accumulate": False, "bias_type": -1, "epilogue": 0, "aux_type": -1,
    "tf32": False, "workspace_limit": 1 << 20,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epilogue": 9999}, "epilogue: got code 9999"),
        ({"a_type": 7, "b_type": 7}, "a: got type code 7"),
        ({"a_type": 20, "b_type": 16, "scaling": 1}, "b: got the other flavour of FP8"),
        ({"a_type": 16, "b_type": 18, "scaling": 1}, "b: got the other flavour of FP8"),
        ({"a_type": 16}, "b: got another kind of operand"),
        ({"a_type": 16, "b_type": 16, "scaling": 5}, "scaling: got code 5"),
        ({"a_type": 16, "b_type": 16}, "scaling: got code 0"),
        ({"out_type": 16}, "out: got a type of 8 bits"),
        ({"m": 0}, "m: got 0, expected at least 1"),
        ({"device": 64}, "device: got 64, this process sees 4"),
        ({"device": -1}, "device: got -1"),
    ],
)
def test_codes_are_checked_here_because_the_library_takes_any(modules, changes, said):
    with pytest.raises(ValueError, match=said):
        modules.native.new_gemm_plan(tuple({**GOOD, **changes}.values()), None)


#: A library that knows no scale modes, such as one before 0.15.
_OLD_LIBRARY = """
#include <stddef.h>
static int made;
int hipblasLtCreate(void **x) { *x = &made; return 0; }
int hipblasLtGetVersion(void *x, int *version) { *version = 1200; return 0; }
int hipblasLtMatmulDescCreate(void **x, int compute, int scale) { *x = &made; return 0; }
int hipblasLtMatmulDescDestroy(void *x) { return 0; }
int hipblasLtMatmulDescSetAttribute(void *x, int name, const void *value, size_t size) { return name < 31 ? 0 : 3; }
int hipblasLtMatrixLayoutCreate(void **x, int type, unsigned long rows, unsigned long columns, long ld) {
  *x = &made;
  return 0;
}
int hipblasLtMatrixLayoutDestroy(void *x) { return 0; }
int hipblasLtMatmulPreferenceCreate(void **x) { *x = &made; return 0; }
int hipblasLtMatmulPreferenceDestroy(void *x) { return 0; }
int hipblasLtMatmulPreferenceSetAttribute(void *x, int name, const void *value, size_t size) { return 0; }
int hipblasLtMatmulAlgoGetHeuristic(void) { return 7; }
int hipblasLtMatmul(void) { return 6; }
"""


def test_what_an_older_release_lacks_is_refused_and_no_error(run_python, host_folder, tmp_path):
    (tmp_path / "old.c").write_text(_OLD_LIBRARY)
    old = str(tmp_path / "old.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", old, str(tmp_path / "old.c")], check=True)
    problem = {**GOOD, "a_type": 16, "b_type": 16, "scaling": 2}
    code = (
        "from te_dispatch_rocm import _native as n\n"
        f"n.open_hip({str(host_folder / 'libamdhip64.so.7')!r}); n.open_hipblaslt({old!r})\n"
        f"for problem in ({tuple(problem.values())}, {tuple(GOOD.values())}):\n"
        "    try: n.new_gemm_plan(problem, None)\n"
        "    except n.GemmRefused as error: print(error)\n"
    )
    assert run_python(code, "gfx950").splitlines() == [
        "hipBLASLt does not take attribute 31 of this product: invalid value",
        "hipBLASLt has no algorithm for this product: not supported",
    ]


def test_null_addresses_and_foreign_algorithms_are_refused(modules):
    plan = modules.native.new_gemm_plan(tuple(GOOD.values()), None)
    with pytest.raises(ValueError, match="a: got a null pointer"):
        modules.native.gemm_run(plan, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0)
    with pytest.raises(ValueError, match="algorithm: got 3 bytes, expected 24"):
        modules.native.new_gemm_plan(tuple(GOOD.values()), b"abc")
    with pytest.raises(ValueError, match="problem: got 2 fields, expected 18"):
        modules.native.new_gemm_plan((0, 1), None)


def test_problems_and_native_code_agree_on_their_fields(modules):
    assert modules.plans.Problem._fields == tuple(GOOD)
    assert math.prod((1, *[len(modules.plans.Problem._fields)])) == 18


# -- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
def test_groups_of_rows_some_of_them_empty(modules, on_device):
    rows = [5, 0, 16, 3]
    x = torch.randn(sum(rows), 40).bfloat16()
    weights = [torch.randn(24, 40).bfloat16() for _ in rows]
    biases = [torch.randn(24).bfloat16() for _ in rows]
    function = modules.grouped.grouped_gemm_device_splits if on_device else modules.grouped.grouped_gemm
    found = function([x], weights, torch.tensor(rows) if on_device else rows, layout="NT", bias=biases)
    for part, weight, bias, result in zip(x.split(rows), weights, biases, found):
        close(result, product(part, weight, "NT") + bias.double())


def test_weight_gradients_of_groups_accumulate_also_where_a_group_is_empty(modules):
    rows = [5, 0, 16]
    dys = [torch.randn(count, 24).bfloat16() for count in rows]
    xs = [torch.randn(count, 40).bfloat16() for count in rows]
    for accumulate in (True, False):
        outs = [torch.ones(24, 40) for _ in rows]
        found = modules.grouped.grouped_gemm(dys, xs, layout="TN", out=outs, accumulate=accumulate)
        for dy, x, out, result in zip(dys, xs, outs, found):
            assert result is out
            close(out, product(dy, x, "TN") + (1 if accumulate else 0))


@pytest.mark.parametrize("chip", ENCODINGS)
def test_groups_of_fp8(modules, chip):
    modules.use(chip)
    encoding = ENCODINGS[chip][0]
    x = record(48, 64, encoding)
    weights = [record(32, 64, encoding) for _ in range(3)]
    found = modules.grouped.grouped_gemm([x], weights, [16, 17, 15], layout="NT", out_dtype=torch.bfloat16)
    for part, weight, result in zip(values(x).split([16, 17, 15]), weights, found):
        close(result, product(part, values(weight), "NT"))


def test_a_group_that_is_declined_leaves_every_output_as_it_was(modules, monkeypatch):
    outs = [torch.full((4, 4), 7.0) for _ in range(2)]
    monkeypatch.setenv("HOST_HIPBLASLT_REFUSE", "all")
    with pytest.raises(Declined):
        modules.grouped.grouped_gemm(
            [torch.randn(4, 8), torch.randn(4, 8)], [torch.randn(4, 8)] * 2, layout="NT", out=outs
        )
    assert all(bool((out == 7).all()) for out in outs)
