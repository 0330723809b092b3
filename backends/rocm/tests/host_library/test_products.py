# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the host library computes, against NumPy. Operands of whole numbers make every sum exact, so results of products
are compared bitwise; GELU's backward, within the roundings of its operations."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

TYPES = {
    "fp32": (0, np.float32),
    "fp16": (2, np.float16),
    "bf16": (14, ml_dtypes.bfloat16),
    "e4m3": (28, ml_dtypes.float8_e4m3fn),
    "e5m2": (29, ml_dtypes.float8_e5m2),
    "e4m3fnuz": (1000, ml_dtypes.float8_e4m3fnuz),
    "e5m2fnuz": (1001, ml_dtypes.float8_e5m2fnuz),
}
EIGHT = [name for name in TYPES if name.startswith("e")]
NUMBERS = {np.dtype(dtype): number for number, dtype in TYPES.values()}


def chip_of(name: str) -> str:
    """A chip that has this encoding."""
    return "gfx942" if name.endswith("fnuz") or not name.startswith("e") else "gfx950"


def whole(shape, dtype, seed, most=4):
    """Column-major whole numbers from -most to most."""
    values = np.random.default_rng(seed).integers(-most, most + 1, shape)
    return np.asfortranarray(values.astype(np.float32).astype(dtype))


def number(x: np.ndarray) -> int:
    return NUMBERS[x.dtype]


def matrix(lt, x: np.ndarray, ld: int = 0):
    assert x.flags.f_contiguous or ld
    return lt.Matrix(number(x), x.shape[0], x.shape[1], x.ctypes.data, ld)


def scalar(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def multiply(lt, a, b, d, transa=False, transb=False, choice=0, c=None, **rest):
    """Run D = op(A) op(B); attributes that are arrays are given by address."""
    keywords = {name: rest.pop(name) for name in ("alpha", "beta", "compute") if name in rest}
    given = {name: value.ctypes.data if isinstance(value, np.ndarray) else value for name, value in rest.items()}
    operations = {"transa": lt.OP_T if transa else lt.OP_N, "transb": lt.OP_T if transb else lt.OP_N}
    product = lt.Product(matrix(lt, a), matrix(lt, b), matrix(lt, d), {**operations, **given}, **keywords)
    if c is not None:
        product.c = matrix(lt, c)
    lt.library.run(product, choice)
    return d


def plain(x: np.ndarray, turned: bool = False) -> np.ndarray:
    values = x.astype(np.float64)
    return values.T if turned else values


def empty(shape, dtype) -> np.ndarray:
    return np.full(shape, np.nan, np.float32).astype(dtype, order="F")


def bits(x: np.ndarray) -> np.ndarray:
    return np.asfortranarray(x).view(f"u{x.itemsize}")


def finite_but_minus_zero(codes: np.ndarray) -> np.ndarray:
    """As a column. A sum starts at 0, and 0 + -0 is 0."""
    values = codes.astype(np.float32)
    return codes[np.isfinite(values) & ~((values == 0) & np.signbit(values))].reshape(-1, 1, order="F")


OUTPUTS = {
    "fp32": ["fp32"], "fp16": ["fp16", "fp32"], "bf16": ["bf16", "fp32"],
    "e4m3": ["bf16", "fp16", "fp32"], "e5m2": ["bf16"], "e4m3fnuz": ["bf16", "fp16", "fp32"], "e5m2fnuz": ["fp32"],
}  # fmt: skip


@pytest.mark.parametrize("transa", [False, True])
@pytest.mark.parametrize("transb", [False, True])
@pytest.mark.parametrize(("operand", "output"), [(one, to) for one, others in OUTPUTS.items() for to in others])
def test_products(lt, monkeypatch, operand, output, transa, transb):
    monkeypatch.setenv("HOST_HIP_DEVICES", chip_of(operand))
    dtype, to = TYPES[operand][1], TYPES[output][1]
    for m, n, k in ((1, 1, 1), (9, 7, 5), (16, 24, 32), (33, 65, 300)):
        a = whole((k, m) if transa else (m, k), dtype, 1)
        b = whole((n, k) if transb else (k, n), dtype, 2)
        exact = plain(a, transa) @ plain(b, transb)
        got = multiply(lt, a, b, empty((m, n), to), transa, transb)
        np.testing.assert_array_equal(bits(got), bits(exact.astype(np.float32).astype(to)))


@pytest.mark.parametrize(("left", "right"), list(itertools.product(["e4m3", "e5m2"], repeat=2)))
@pytest.mark.parametrize("suffix", ["", "fnuz"])
def test_the_two_encodings_of_a_chip_multiply(lt, monkeypatch, left, right, suffix):
    monkeypatch.setenv("HOST_HIP_DEVICES", chip_of(left + suffix))
    a, b = whole((6, 40), TYPES[left + suffix][1], 1), whole((40, 5), TYPES[right + suffix][1], 2)
    got = multiply(lt, a, b, empty((6, 5), np.float32))
    np.testing.assert_array_equal(got, plain(a) @ plain(b))


@pytest.mark.parametrize("name", EIGHT)
def test_every_code_is_read_as_ml_dtypes_reads_it(lt, monkeypatch, name):
    monkeypatch.setenv("HOST_HIP_DEVICES", chip_of(name))
    dtype = TYPES[name][1]
    codes = np.arange(256, dtype=np.uint8).view(dtype).reshape(256, 1, order="F")
    got = multiply(lt, codes, np.ones((1, 1), dtype, order="F"), empty((256, 1), np.float32))
    np.testing.assert_array_equal(got, codes.astype(np.float32))


@pytest.mark.parametrize("name", EIGHT)
def test_every_code_is_written_as_ml_dtypes_writes_it(lt, monkeypatch, name):
    monkeypatch.setenv("HOST_HIP_DEVICES", chip_of(name))
    dtype = TYPES[name][1]
    one = np.ones((1, 1), dtype, order="F")
    finite = finite_but_minus_zero(np.arange(256, dtype=np.uint8).view(dtype))
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    factors = [1.0, 1.0625, 0.96875, 0.5, 1 / 3, 2.0**-9, 2.0**-17, *np.random.default_rng(3).uniform(0, 1.2, 40)]
    for factor in np.array(factors, np.float32):
        got = multiply(lt, finite, one, empty(finite.shape, dtype), d_scale=scalar(factor))
        wanted = np.clip(finite.astype(np.float32) * factor, -largest, largest).astype(dtype)
        np.testing.assert_array_equal(bits(got), bits(wanted), err_msg=str(factor))


@pytest.mark.parametrize("name", EIGHT)
def test_infinities_and_nan_of_fp8(lt, monkeypatch, name):
    """e5m2 has infinities; the others have NaN alone."""
    monkeypatch.setenv("HOST_HIP_DEVICES", chip_of(name))
    dtype = TYPES[name][1]
    a, one = np.array([[1], [-1], [0]], np.float32).astype(dtype, order="F"), np.ones((1, 1), dtype, order="F")
    got = multiply(lt, a, one, empty((3, 1), dtype), d_scale=scalar(np.inf)).astype(np.float32).ravel()
    edge = np.inf if name == "e5m2" else np.nan
    np.testing.assert_array_equal(got, [edge, -edge, np.nan])


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_sixteen_bits_are_rounded_to_even(lt, name):
    dtype = TYPES[name][1]
    values = finite_but_minus_zero(np.arange(65536, dtype=np.uint16).view(dtype))
    one = np.ones((1, 1), dtype, order="F")
    for factor in np.array([1.0, 1 + 2.0**-9, 1 + 2.0**-12, 1 / 3, 2.0**-10], np.float32):
        got = multiply(lt, values, one, empty(values.shape, dtype), alpha=float(factor))
        with np.errstate(over="ignore"):
            wanted = (values.astype(np.float32) * factor).astype(dtype)
        np.testing.assert_array_equal(bits(got), bits(wanted))


def test_leading_dimensions_beyond_the_matrix(lt):
    a, b, d = whole((9, 6), np.float32, 1), whole((10, 7), np.float32, 2), empty((8, 7), np.float32)
    product = lt.Product(
        lt.Matrix(lt.R_32F, 5, 6, a.ctypes.data, 9), lt.Matrix(lt.R_32F, 6, 7, b.ctypes.data, 10),
        lt.Matrix(lt.R_32F, 5, 7, d.ctypes.data, 8),
    )  # fmt: skip
    lt.library.run(product)
    np.testing.assert_array_equal(d[:5], plain(a[:5]) @ plain(b[:6]))
    assert np.isnan(d[5:]).all()


def test_alpha_beta_and_c(lt):
    a, b, c = whole((5, 6), np.float32, 1), whole((6, 7), np.float32, 2), whole((5, 7), np.float32, 3)
    exact = plain(a) @ plain(b)
    got = multiply(lt, a, b, empty((5, 7), np.float32), alpha=0.5, beta=2.0, c=c)
    np.testing.assert_array_equal(got, 0.5 * exact + 2 * c)
    inside = c.copy(order="F")
    np.testing.assert_array_equal(multiply(lt, a, b, inside, beta=1.0), exact + c)
    unread = empty((5, 7), np.float32)
    np.testing.assert_array_equal(multiply(lt, a, b, unread, beta=0.0), exact)
    a[:] = np.nan
    np.testing.assert_array_equal(multiply(lt, a, b, c.copy(order="F"), alpha=0.0, beta=1.0), c)


def test_batches(lt):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((3, 6, 5), (3, 7, 6)))
    d = np.full((3, 7, 5), np.nan, np.float32)  # of each batch, the transposed column-major matrix
    product = lt.Product(
        lt.Matrix(lt.R_32F, 5, 6, a.ctypes.data, batch_count=3, batch_stride=30),
        lt.Matrix(lt.R_32F, 6, 7, b.ctypes.data, batch_count=3, batch_stride=42),
        lt.Matrix(lt.R_32F, 5, 7, d.ctypes.data, batch_count=3, batch_stride=35),
    )
    lt.library.run(product)
    np.testing.assert_array_equal(d, b @ a)


def test_scales(lt, monkeypatch):
    a, b = whole((5, 6), ml_dtypes.float8_e4m3fnuz, 1), whole((6, 7), ml_dtypes.float8_e4m3fnuz, 2)
    exact = plain(a) @ plain(b)
    sa, sb = scalar(0.25), scalar(8.0)
    got = multiply(lt, a, b, empty((5, 7), np.float32), a_scale=sa, b_scale=sb, alpha=0.5)
    np.testing.assert_array_equal(got, exact)
    rows, columns = (2.0 ** np.arange(-2, count - 2).astype(np.float32) for count in (5, 7))
    got = multiply(
        lt, a, b, empty((5, 7), np.float32), a_scale=rows, b_scale=columns, a_scale_mode=3, b_scale_mode=3
    )  # fmt: skip
    np.testing.assert_array_equal(got, exact * np.outer(rows, columns))


@pytest.mark.parametrize("transa", [False, True])
@pytest.mark.parametrize("transb", [False, True])
def test_scales_of_blocks(lt, monkeypatch, transa, transb):
    """The scales lie as the elements do, with k divided by 32."""
    monkeypatch.setenv("HOST_HIP_DEVICES", "gfx950")
    m, n, k = 32, 64, 96
    a = whole((k, m) if transa else (m, k), ml_dtypes.float8_e4m3fn, 1)
    b = whole((n, k) if transb else (k, n), ml_dtypes.float8_e5m2, 2)
    rng = np.random.default_rng(5)
    # Codes of (outer, k / 32); 127 stands for 1.
    a_codes, b_codes = (rng.integers(124, 131, (outer, k // 32)).astype(np.uint8) for outer in (m, n))
    a_values, b_values = (np.repeat(np.exp2(codes - 127.0), 32, axis=1) for codes in (a_codes, b_codes))
    exact = (plain(a, transa) * a_values) @ (plain(b, transb).T * b_values).T
    a_laid = np.ascontiguousarray(a_codes if transa else a_codes.T)
    b_laid = np.ascontiguousarray(b_codes.T if transb else b_codes)
    got = multiply(
        lt, a, b, empty((m, n), np.float32), transa, transb,
        a_scale=a_laid, b_scale=b_laid, a_scale_mode=2, b_scale_mode=2,
    )  # fmt: skip
    np.testing.assert_array_equal(got, exact)


def test_amax_is_of_the_values_before_their_scale(lt):
    a, b = whole((5, 6), ml_dtypes.float8_e4m3fnuz, 1), whole((6, 7), ml_dtypes.float8_e4m3fnuz, 2)
    exact, amax = plain(a) @ plain(b), np.full(1, np.nan, np.float32)
    got = multiply(lt, a, b, empty((5, 7), a.dtype), d_scale=scalar(0.5), amax_d=amax)
    np.testing.assert_array_equal(bits(got), bits((exact * 0.5).astype(np.float32).astype(a.dtype)))
    assert amax[0] == np.abs(exact).max()


def test_tf32_is_rounded_to_on_gfx942_alone(lt, monkeypatch):
    a = np.random.default_rng(1).standard_normal((16, 1)).astype(np.float32, order="F")
    one = np.ones((1, 1), np.float32, order="F")
    rounded = multiply(lt, a, one, empty((16, 1), np.float32), compute=lt.COMPUTE_TF32)
    assert (bits(rounded) & 0x1FFF == 0).all()
    np.testing.assert_allclose(rounded, a, rtol=2.0**-11)
    monkeypatch.setenv("HOST_HIP_DEVICES", "gfx90a")
    kept = multiply(lt, a, one, empty((16, 1), np.float32), compute=lt.COMPUTE_TF32)
    np.testing.assert_array_equal(kept, a)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


@pytest.mark.parametrize("bias_type", ["bf16", "fp32"])
def test_bias(lt, bias_type):
    a, b = whole((5, 6), ml_dtypes.bfloat16, 1, 2), whole((6, 7), ml_dtypes.bfloat16, 2, 2)
    code, dtype = TYPES[bias_type]
    bias = whole((5,), dtype, 3)
    got = multiply(lt, a, b, empty((5, 7), ml_dtypes.bfloat16), epilogue=lt.BIAS, bias=bias, bias_type=code)
    np.testing.assert_array_equal(plain(got), plain(a) @ plain(b) + bias.astype(np.float64)[:, None])


def test_gelu_and_its_input(lt):
    a, b, bias = whole((5, 6), np.float16, 1, 1), whole((6, 7), np.float16, 2, 1), whole((5,), np.float16, 3)
    before = plain(a) @ plain(b) + bias.astype(np.float64)[:, None]
    aux = empty((8, 7), np.float16)
    got = multiply(
        lt, a, b, empty((5, 7), np.float16), epilogue=lt.GELU_AUX_BIAS, bias=bias, aux=aux, aux_ld=8
    )  # fmt: skip
    np.testing.assert_array_equal(aux[:5], before)
    assert np.isnan(aux[5:]).all()
    np.testing.assert_array_equal(got, gelu(before).astype(np.float32).astype(np.float16))
    plain_gelu = multiply(lt, a, b, empty((5, 7), np.float16), epilogue=lt.GELU_BIAS, bias=bias)
    np.testing.assert_array_equal(bits(plain_gelu), bits(got))


def test_gelu_s_backward_and_its_bias_gradient(lt):
    a, b = whole((5, 6), np.float16, 1), whole((6, 7), np.float16, 2)
    aux = np.random.default_rng(4).standard_normal((5, 7)).astype(np.float16, order="F")
    exact = (plain(a) @ plain(b)) * gelu_slope(plain(aux))
    bias = np.full(5, np.nan, np.float32)
    got = multiply(
        lt, a, b, empty((5, 7), np.float16), epilogue=lt.DGELU_BGRAD, aux=aux, aux_ld=5, bias=bias, bias_type=lt.R_32F
    )  # fmt: skip
    np.testing.assert_allclose(got, exact, rtol=2.0**-10, atol=2.0**-24)
    np.testing.assert_allclose(bias, exact.sum(1), rtol=2.0**-18, atol=2.0**-20)
    without = multiply(lt, a, b, empty((5, 7), np.float16), epilogue=lt.DGELU, aux=aux, aux_ld=5)
    np.testing.assert_array_equal(bits(without), bits(got))


@pytest.mark.parametrize("transa", [False, True])
@pytest.mark.parametrize("transb", [False, True])
def test_bias_gradients_of_operands(lt, transa, transb):
    m, n, k = 5, 7, 300
    a = whole((k, m) if transa else (m, k), ml_dtypes.bfloat16, 1)
    b = whole((n, k) if transb else (k, n), ml_dtypes.bfloat16, 2)
    product = (plain(a, transa) @ plain(b, transb)).astype(np.float32).astype(ml_dtypes.bfloat16)
    for epilogue, wanted in ((lt.BGRADA, plain(a, transa).sum(1)), (lt.BGRADB, plain(b, transb).sum(0))):
        bias = np.full(len(wanted), np.nan, np.float32)
        got = multiply(
            lt, a, b, empty((m, n), ml_dtypes.bfloat16), transa, transb,
            epilogue=epilogue, bias=bias, bias_type=lt.R_32F,
        )  # fmt: skip
        np.testing.assert_array_equal(bits(got), bits(product))
        np.testing.assert_array_equal(bias, wanted)


def test_an_element_does_not_depend_on_the_others(lt):
    """A row of the product of a larger matrix has the bits that it has by itself."""
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal(shape).astype(np.float32, order="F") for shape in ((37, 700), (700, 23)))
    whole_product = multiply(lt, a, b, empty((37, 23), np.float32))
    for i, j in ((0, 0), (8, 6), (36, 22)):
        row, column = np.asfortranarray(a[i : i + 1]), np.asfortranarray(b[:, j : j + 1])
        alone = multiply(lt, row, column, empty((1, 1), np.float32))
        assert bits(alone)[0, 0] == bits(whole_product)[i, j]


def test_every_algorithm_computes_the_same(lt):
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal((40, 40)).astype(np.float32, order="F") for _ in range(2))
    first, second, third = (multiply(lt, a, b, empty((40, 40), np.float32), choice=choice) for choice in range(3))
    np.testing.assert_array_equal(bits(first), bits(second))
    np.testing.assert_array_equal(bits(first), bits(third))


def test_a_product_over_nothing_is_what_follows_it(lt):
    a, b = np.zeros((4, 0), np.float32, order="F"), np.zeros((0, 3), np.float32, order="F")
    bias = np.arange(4, dtype=np.float32)
    c = whole((4, 3), np.float32, 1)
    product = lt.Product(
        lt.Matrix(lt.R_32F, 4, 0, a.ctypes.data, 4), lt.Matrix(lt.R_32F, 0, 3, b.ctypes.data, 1),
        matrix(lt, c), {"epilogue": lt.BIAS, "bias": bias.ctypes.data}, beta=1.0,
    )  # fmt: skip
    before = c.copy()
    lt.library.run(product)
    np.testing.assert_array_equal(c, before + bias[:, None])
