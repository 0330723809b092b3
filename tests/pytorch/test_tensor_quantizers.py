# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantizers under Transformer Engine's names: their arguments, and the casts they stand for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.numerics import quantizers as records

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2

#: Required arguments, then the others with their defaults, of Transformer Engine 2.20.2.
ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Float8Quantizer": ("scale amax fp8_dtype", {"rowwise": True, "columnwise": True}),
    "Float8CurrentScalingQuantizer": (
        "fp8_dtype device",
        {
            "rowwise": True,
            "columnwise": True,
            "use_existing_amax": False,
            "with_amax_reduction": False,
            "amax_reduction_group": None,
            "force_pow_2_scales": False,
            "amax_epsilon": 0.0,
            "scale": None,
            "amax": None,
        },
    ),
    "MXFP8Quantizer": ("fp8_dtype", {"rowwise": True, "columnwise": True, "with_2d_quantization": False}),
    "Float8BlockQuantizer": (
        "fp8_dtype rowwise columnwise",
        {"amax_epsilon": 0.0, "force_pow_2_scales": True, "block_scaling_dim": 2},
    ),
    "NVFP4Quantizer": (
        "",
        {
            "fp4_dtype": 10,
            "rowwise": True,
            "columnwise": True,
            "with_amax_reduction": False,
            "amax_reduction_group": None,
            "with_rht": False,
            "with_post_rht_amax": False,
            "with_2d_quantization": False,
            "stochastic_rounding": False,
            "row_scaled_nvfp4": False,
            "nvfp4_use_4over6": False,
            "nvfp4_e4m3_max": 448,
            "nvfp4_4over6_err_mode": "MAE",
            "with_random_sign_mask": True,
        },
    ),
    "IdentityQuantizer": ("", {"dtype": None, "rowwise": True, "columnwise": True}),
    "HybridQuantizer": ("rowwise_quantizer columnwise_quantizer", {"columnwise_source": "original"}),
    "Quantizer": ("rowwise columnwise", {}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    required, others = ARGUMENTS[name]
    parameters = inspect.signature(getattr(te, name)).parameters.values()
    empty = inspect.Parameter.empty
    assert [p.name for p in parameters if p.default is empty] == required.split()
    assert {p.name: p.default for p in parameters if p.default is not empty} == others


#: Quantizers and the casts that they stand for.
CASTS: dict[str, tuple[te.Quantizer, records.Quantizer]] = {
    "current": (te.Float8CurrentScalingQuantizer(E5M2, "cpu"), records.CurrentQuantizer("e5m2")),
    "current, knobs": (
        te.Float8CurrentScalingQuantizer(7, "cpu", force_pow_2_scales=True, amax_epsilon=0.5),
        records.CurrentQuantizer("e4m3fn", False, True, 0.5),
    ),
    "mxfp8": (te.MXFP8Quantizer(torch.float8_e4m3fn), records.MXFP8Quantizer("e4m3fn")),
    "tiles": (
        te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True), records.BlockQuantizer("e4m3fn", two_d=True)
    ),
    "blocks, knobs": (
        te.Float8BlockQuantizer(
            E5M2, rowwise=True, columnwise=True, amax_epsilon=0.25, force_pow_2_scales=False, block_scaling_dim=1
        ),
        records.BlockQuantizer("e5m2", False, False, False, 0.25),
    ),
    "nvfp4": (te.NVFP4Quantizer(), records.NVFP4Quantizer()),
    "mxfp8, 2D": (te.MXFP8Quantizer(E4M3, with_2d_quantization=True), records.MXFP8TileQuantizer("e4m3fn")),
    "nvfp4, 2D": (te.NVFP4Quantizer(with_2d_quantization=True), records.NVFP4Quantizer(two_d=True)),
    "nvfp4, 4 over 6": (
        te.NVFP4Quantizer(nvfp4_use_4over6=True),
        records.NVFP4FourOverSixQuantizer(scale_max=448),
    ),
    "nvfp4, 4 over 6, knobs": (
        te.NVFP4Quantizer(
            with_2d_quantization=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE"
        ),
        records.NVFP4FourOverSixQuantizer(two_d=True, scale_max=256, error="MSE"),
    ),
    "nvfp4, rotated": (
        te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True), records.NVFP4HadamardQuantizer("e2m1")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASTS)
def test_casts(case: str) -> None:
    quantizer, record = CASTS[case]
    assert quantizer.cast(("e4m3fn", "e5m2"), False) == record
    x = torch.randn(32, 64)
    made = quantizer(x)
    assert isinstance(made, te.QuantizedTensor)
    expected = ops.quantize(x, record, usage="both")
    for part in ("row_data", "row_scale_inv", "col_data", "col_scale_inv"):
        assert torch.equal(getattr(made.record, part), getattr(expected, part)), part


def test_encodings_are_the_devices() -> None:
    fnuz = te.MXFP8Quantizer(E4M3).cast(("e4m3fnuz", "e5m2fnuz"), True)
    assert fnuz == records.MXFP8Quantizer("e4m3fnuz", True)


@pytest.mark.parametrize("shape", [(1,), ()])
def test_scales_of_the_users_own(shape: tuple[int, ...]) -> None:
    scale, amax, x = torch.full(shape, 4.0), torch.full(shape, 0.5), torch.tensor([[1.0, -3.0]])
    quantizer = te.Float8Quantizer(scale, amax, E4M3, columnwise=False)
    made = quantizer.quantize(x)
    assert torch.equal(made.dequantize(), x) and made.record.row_scale_inv.item() == 0.25
    assert amax.item() == 3.0
    scale.fill_(2.0)
    assert quantizer.quantize(x).record.row_scale_inv.item() == 0.5


def test_usages() -> None:
    quantizer, x = te.MXFP8Quantizer(E4M3, columnwise=False), torch.randn(32, 64, requires_grad=True)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    other = quantizer.copy()
    other.set_usage(rowwise=False, columnwise=True)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    row, column = quantizer.quantize(x, dtype=torch.bfloat16), other.quantize(x)
    assert row.record.col_data is None and column.record.row_data is None
    assert row.dtype == torch.bfloat16 and column.dtype == torch.float32
    other.set_usage(columnwise=False)
    with pytest.raises(ValueError, match="rowwise and columnwise are both False"):
        other.quantize(x)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_pass_straight_through(dtype: torch.dtype | None, stochastic: bool) -> None:
    quantizer, x = te.NVFP4Quantizer(stochastic_rounding=stochastic), torch.randn(32, 64, requires_grad=True)
    made, dy = quantizer.quantize(x, dtype=dtype), torch.randn(32, 64).bfloat16().float()
    assert isinstance(made, te.QuantizedTensor) and made.requires_grad and made.grad_fn is not None
    made.dequantize().backward(dy.to(made.dtype))
    assert x.grad.dtype == torch.float32 and torch.equal(x.grad, dy)
    with torch.no_grad():
        assert not quantizer(x).requires_grad
    assert not quantizer(x.detach()).requires_grad


def test_gradients_pass_an_identity() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    te.IdentityQuantizer()(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 4))


def test_stochastic_rounding_draws() -> None:
    x, quantizer = torch.full((32, 64), 0.7), te.NVFP4Quantizer(stochastic_rounding=True)
    x[0, 0] = 6.0
    assert len(te.NVFP4Quantizer()(x).dequantize()[2].unique()) == 1
    assert not torch.equal(quantizer(x).dequantize(), quantizer(x).dequantize())


def test_no_cast() -> None:
    x = torch.randn(4, 4)
    assert torch.equal(te.IdentityQuantizer()(x), x)
    assert te.IdentityQuantizer().quantize(x, dtype=torch.bfloat16).dtype == torch.bfloat16


SCALE = torch.ones(1)


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: te.MXFP8Quantizer(te.DType.kFloat4E2M1), ValueError, "MXFP8Quantizer: fp8_dtype"),
        (lambda: te.MXFP8Quantizer([]), ValueError, "fp8_dtype"),
        (lambda: te.Float8Quantizer(1.0, SCALE, E4M3), TypeError, "scale"),
        (lambda: te.Float8Quantizer(SCALE, torch.ones(2), E4M3), ValueError, "amax"),
        (lambda: te.Float8Quantizer(SCALE.double(), SCALE, E4M3), ValueError, "scale"),
        (lambda: te.Float8Quantizer(SCALE, SCALE, torch.uint8), ValueError, "fp8_dtype"),
        (
            lambda: te.Float8CurrentScalingQuantizer(E4M3, "cpu", use_existing_amax=True),
            NotImplementedError,
            "existing",
        ),
        (lambda: te.Float8CurrentScalingQuantizer(E4M3, "cpu", with_amax_reduction=True), NotImplementedError, "reduc"),
        (lambda: te.Float8CurrentScalingQuantizer(E4M3, "cpu", scale=SCALE), NotImplementedError, "scale"),
        (lambda: te.Float8CurrentScalingQuantizer(E4M3, "cpu", amax=SCALE), NotImplementedError, "amax"),
        (lambda: te.Float8CurrentScalingQuantizer(E4M3, "cpu", amax_epsilon=-1.0), ValueError, "amax_epsilon"),
        (
            lambda: te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=3),
            ValueError,
            "block_scaling_dim",
        ),
        (lambda: te.NVFP4Quantizer(E4M3), ValueError, "fp4_dtype"),
        (lambda: te.NVFP4Quantizer(with_amax_reduction=True), NotImplementedError, "with_amax_reduction"),
        (lambda: te.NVFP4Quantizer(row_scaled_nvfp4=True), NotImplementedError, "row_scaled_nvfp4"),
        (
            lambda: te.NVFP4Quantizer(nvfp4_use_4over6=True, stochastic_rounding=True),
            NotImplementedError,
            "stochastic_rounding",
        ),
        (
            lambda: te.NVFP4Quantizer(nvfp4_use_4over6=True, with_rht=True, with_post_rht_amax=True),
            NotImplementedError,
            "nvfp4_use_4over6",
        ),
        (lambda: te.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=300), ValueError, "scale_max: got 300"),
        (lambda: te.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="mae"), ValueError, "error: got"),
        (lambda: te.NVFP4Quantizer(nvfp4_e4m3_max=256), NotImplementedError, "nvfp4_e4m3_max"),
        (lambda: te.NVFP4Quantizer(with_rht=True), NotImplementedError, "with_post_rht_amax"),
        (lambda: te.NVFP4Quantizer(with_post_rht_amax=True), NotImplementedError, "with_post_rht_amax"),
        (
            lambda: te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_2d_quantization=True),
            NotImplementedError,
            "with_2d_quantization",
        ),
        (
            lambda: te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False),
            NotImplementedError,
            "with_random_sign_mask",
        ),
        (lambda: te.IdentityQuantizer(dtype=torch.float32), NotImplementedError, "dtype"),
        (
            lambda: te.HybridQuantizer(rowwise_quantizer=None, columnwise_quantizer=None),
            NotImplementedError,
            "HybridQuantizer",
        ),
    ],
)
def test_refused_arguments(make: Any, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        make()


def test_roles() -> None:
    role = te.QuantizerRole(module_type="linear", tensor_type="weight", name="qkv")
    assert role == te.QuantizerRole("linear", "weight", "qkv") and len({role, te.QuantizerRole()}) == 2
    assert str(role) == "module_type=linear|tensor_type=weight|name=qkv"
    assert str(te.QuantizerRole()) == "QuantizerRole()"
    with pytest.raises(AttributeError):
        role.name = "proj"  # type: ignore[misc]


def _tensor_quantizers() -> dict[str, Any]:
    return {
        "delayed": te.Float8Quantizer(torch.full((1,), 2.0), torch.zeros(1), E4M3),
        "current": te.Float8CurrentScalingQuantizer(E5M2, "cpu"),
        "block_1d": te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
        "block_2d": te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
        "mxfp8": te.MXFP8Quantizer(E4M3),
        "nvfp4": te.NVFP4Quantizer(),
    }


@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", list(_tensor_quantizers()))
def test_casts_into_a_tensor_that_is_there(name: str, usages: tuple[bool, bool]) -> None:
    quantizer, other = _tensor_quantizers()[name], _tensor_quantizers()[name]
    for one in (quantizer, other):
        one.set_usage(rowwise=usages[0], columnwise=usages[1])
    torch.manual_seed(0)
    x = torch.randn(48, 64, dtype=torch.bfloat16)
    made = quantizer.make_empty((48, 64), dtype=torch.bfloat16, device="cpu")
    expected = other.quantize(x)
    assert (made.shape, made.dtype, made.requires_grad) == (expected.shape, expected.dtype, False)
    parts = [getattr(made, part) for part in ("_row_data", "_col_data", "_row_scale_inv", "_col_scale_inv")]
    assert quantizer.update_quantized(x, made) is made
    assert parts[0] is made._row_data and parts[1] is made._col_data
    for part in ("_row_data", "_col_data", "_row_scale_inv", "_col_scale_inv", "_global_scale_inv"):
        one, right = getattr(made, part), getattr(expected, part)
        assert (one is None) == (right is None) and (one is None or torch.equal(one, right)), part
    before = made.dequantize() if usages[0] else None
    assert quantizer.update_quantized(x * 3, made, noop_flag=torch.ones(1)) is made
    assert before is None or torch.equal(made.dequantize(), before)
    assert quantizer.quantize(-x, out=made) is made
    assert before is None or torch.equal(made.dequantize(), -before)


def test_what_cannot_be_cast_into_is_named() -> None:
    quantizer = te.MXFP8Quantizer(E4M3)
    x = torch.randn(64, 32)
    made = quantizer.quantize(x)
    with pytest.raises(ValueError, match="dst: got a Tensor, expected a QuantizedTensor"):
        quantizer.update_quantized(x, x.clone())
    quantizer.set_usage(columnwise=False)
    with pytest.raises(ValueError, match="no slice"):
        quantizer.update_quantized(x[:32], quantizer.quantize(x)[:32])
    with pytest.raises(ValueError, match=r"src: got shape \(32, 32\), expected that of dst, \(64, 32\)"):
        quantizer.update_quantized(torch.randn(32, 32), made)
    with pytest.raises(ValueError, match="out"):
        te.Float8CurrentScalingQuantizer(E4M3, "cpu").update_quantized(x, made)
    with pytest.raises(NotImplementedError, match="dtype"):
        quantizer.quantize(x, out=made, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="pin_memory"):
        quantizer.make_empty((64, 32), pin_memory=True)


def test_identity_writes_and_makes_ordinary_tensors() -> None:
    quantizer, x = te.IdentityQuantizer(), torch.randn(4, 8)
    made = quantizer.make_empty((4, 8), dtype=torch.float16, device="cpu", requires_grad=True)
    assert type(made) is torch.Tensor and made.requires_grad and made.dtype == torch.float16
    assert quantizer.update_quantized(x, made) is made and torch.equal(made.detach(), x.half())
    quantizer.update_quantized(-x, made, noop_flag=torch.ones(1))
    assert torch.equal(made.detach(), x.half())
    with pytest.raises(ValueError, match="ordinary tensor"):
        quantizer.update_quantized(x, te.MXFP8Quantizer(E4M3).quantize(torch.randn(32, 32)))
