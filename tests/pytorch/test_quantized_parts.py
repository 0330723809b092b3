# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantized tensors under the names of Transformer Engine's tensor classes."""

from __future__ import annotations

import pytest
import torch

from te_dispatch import ops
from te_dispatch.pytorch import tensor as te

E4M3 = te.DType.kFloat8E4M3
BOTH = {"rowwise": True, "columnwise": True}
M, K = 96, 256

FORMATS = {
    "Float8Tensor": lambda: te.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3),
    "Float8Tensor, current": lambda: te.Float8CurrentScalingQuantizer(E4M3, "cpu"),
    "Float8BlockwiseQTensor": lambda: te.Float8BlockQuantizer(E4M3, **BOTH),
    "Float8BlockwiseQTensor, 1D": lambda: te.Float8BlockQuantizer(E4M3, **BOTH, block_scaling_dim=1),
    "MXFP8Tensor": lambda: te.MXFP8Quantizer(E4M3),
    "NVFP4Tensor": lambda: te.NVFP4Quantizer(),
}
KINDS = ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor")


@pytest.fixture
def x():
    return torch.randn(M, K, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FORMATS)
def test_a_tensor_is_an_instance_of_its_formats_classes(name, x):
    made, own = FORMATS[name]()(x), name.partition(",")[0]
    for one in (made, torch.nn.Parameter(made), made.detach()):
        for kind in KINDS:
            assert isinstance(one, getattr(te, kind)) == isinstance(one, getattr(te, f"{kind}Storage")) == (kind == own)
        assert isinstance(one, te.QuantizedTensorStorage) and isinstance(one, te.QuantizedTensor)
    for kind in (*KINDS, "QuantizedTensorStorage", *(f"{kind}Storage" for kind in KINDS)):
        assert not isinstance(x, getattr(te, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_of_tensors_makes_none(kind):
    assert issubclass(getattr(te, kind), te.QuantizedTensor)
    for one in (getattr(te, kind), getattr(te, f"{kind}Storage")):
        with pytest.raises(NotImplementedError, match=one.__name__):
            one(shape=(2, 2), dtype=torch.float32)


def test_a_class_derived_from_one_has_its_own_instances(x):
    class Mine(te.Float8Tensor):
        pass

    made = te.Float8CurrentScalingQuantizer(E4M3, "cpu")(x)
    assert not isinstance(made, Mine) and isinstance(made, te.Float8Tensor)


SHAPES = {
    "Float8BlockwiseQTensor": ((M, K), (1, 2), (K, M), (2, 1)),
    "Float8BlockwiseQTensor, 1D": ((M, K), (2, M), (K, M), (1, K)),
    "MXFP8Tensor": ((M, K), (M, K // 32), (M, K), (M // 32, K)),
    "NVFP4Tensor": ((M, K // 2), (M, K // 16), (K, M // 2), (K, M // 16)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_parts_of_a_format_with_blocks(name, x):
    made = FORMATS[name]()(x)
    parts = made._rowwise_data, made._rowwise_scale_inv, made._columnwise_data, made._columnwise_scale_inv
    assert tuple(tuple(part.shape) for part in parts) == SHAPES[name]
    record = made.record
    assert parts[0] is record.row_data and parts[2] is record.col_data
    assert parts[1].data_ptr() == record.row_scale_inv.data_ptr()
    assert not hasattr(made, "_data") and not hasattr(made, "_scale_inv") and not hasattr(made, "_transpose")
    assert hasattr(made, "_fp4_dtype") != hasattr(made, "_fp8_dtype")
    with pytest.raises(AttributeError, match="_rowwise_data"):
        made._rowwise_data = parts[0]
    made.update_usage(columnwise_usage=False)
    assert made._columnwise_data is None and made._columnwise_scale_inv is None


def test_blocks_in_one_dimension_scale_by_block_and_row(x):
    made = FORMATS["Float8BlockwiseQTensor, 1D"]()(x)
    codes = made._rowwise_data.view(torch.float8_e4m3fn).float()
    by_hand = codes * made._rowwise_scale_inv.t().repeat_interleave(128, 1)
    assert torch.equal(by_hand, made.dequantize()) and not made._is_2D_scaled
    codes = made._columnwise_data.view(torch.float8_e4m3fn).float()
    by_hand = codes * made._columnwise_scale_inv.t().repeat_interleave(128, 1)[:, :M]
    torch.testing.assert_close(by_hand.t(), x, rtol=0.07, atol=0.02)


@pytest.mark.parametrize("name", ["Float8Tensor", "Float8Tensor, current"])
def test_the_parts_of_one_scale_per_tensor(name, x):
    made = FORMATS[name]()(x)
    values = made._data.view(torch.float8_e4m3fn).float() * made._scale_inv
    assert torch.equal(values, made.dequantize()) and torch.equal(made._transpose, made._data.t())
    assert made._fp8_dtype is E4M3 and not made._transpose_invalid
    assert not hasattr(made, "_rowwise_data") and not hasattr(made, "_fp4_dtype")
    made._data.zero_()  # what is written into a part is in the tensor
    assert not made.dequantize().any()
    with pytest.raises(AttributeError, match="_data"):
        made._data = values


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "MXFP8Tensor"])
def test_data_moves_into_memory_of_the_callers(name, x):
    made = FORMATS[name]()(x)
    values, column, scale = made.dequantize(), made.record.col_data, made.record.row_scale_inv
    buffer = torch.zeros(2, *made.record.row_data.shape, dtype=torch.uint8)
    te.replace_raw_data(made, buffer[1])
    assert made.record.row_data.data_ptr() == buffer[1].data_ptr() and torch.equal(made.dequantize(), values)
    assert made.record.col_data is column and made.record.row_scale_inv is scale
    made.quantize_(2 * x)
    assert torch.equal(buffer[1], FORMATS[name]()(2 * x).record.row_data) and not buffer[0].any()
    with pytest.raises(ValueError, match="must be contiguous"):
        te.replace_raw_data(made, torch.zeros(K, M, dtype=torch.uint8))
    with pytest.raises(ValueError, match="must be contiguous"):
        te.replace_raw_data(made, torch.zeros(K, M, dtype=torch.uint8).t())
    made.update_usage(rowwise_usage=False)
    with pytest.raises(ValueError, match="row-wise"):
        te.replace_raw_data(made, buffer[0])


def test_data_of_other_formats_does_not(x):
    for other in (x, FORMATS["MXFP8Tensor"]()(x)):
        with pytest.raises(NotImplementedError, match="replace_raw_data"):
            te.replace_raw_data(other, torch.zeros(M, K, dtype=torch.uint8))


def test_scales_that_lie_as_a_kernel_reads_them_are_refused(x):
    record = ops.relayout_scales(FORMATS["MXFP8Tensor"]()(x).record, scale_layout="swizzled_32x4x4")
    from te_dispatch.pytorch.tensor.quantized_tensor import as_tensor

    with pytest.raises(RuntimeError, match="relayout_scales"):
        _ = as_tensor(record)._rowwise_scale_inv


@pytest.mark.parametrize("name", FORMATS)
def test_the_quantizer_of_a_tensor_casts_as_it_was_cast(name, x):
    quantizer = FORMATS[name]()
    quantizer.set_usage(columnwise=False)
    made = quantizer(x)
    again = made._get_quantizer()
    assert type(again) is type(quantizer) and again.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.equal(again(2 * x).dequantize(), quantizer(2 * x).dequantize())
    assert made.quantize_(2 * x) is made and torch.equal(made.dequantize(), quantizer(2 * x).dequantize())
    made.quantize_(x, noop_flag=torch.ones(1))
    assert torch.equal(made.dequantize(), quantizer(2 * x).dequantize())
    with pytest.raises(ValueError, match=r"src: got shape \(2, 2\)"):
        made.quantize_(torch.ones(2, 2))


@pytest.mark.parametrize("name", FORMATS)
def test_usages_of_a_tensor(name, x):
    made = FORMATS[name]()(x)
    before = made.record
    assert made.get_usages() == BOTH
    made.update_usage()
    assert made.get_usages() == BOTH
    made.update_usage(columnwise_usage=False)
    assert made.get_usages() == {"rowwise": True, "columnwise": False}
    if before.scaling in ("tensor", "block_2d"):
        made.update_usage(columnwise_usage=True)
        assert torch.equal(made.record.col_data, before.col_data)
        assert torch.equal(made.record.col_scale_inv, before.col_scale_inv)
    else:
        with pytest.raises(RuntimeError, match="cannot be made of the row-wise one"):
            made.update_usage(rowwise_usage=False, columnwise_usage=True)
    with pytest.raises(RuntimeError, match="no copy would be left"):
        made.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert made.get_usages()["rowwise"]
    columns = FORMATS[name]()(x)
    columns.update_usage(rowwise_usage=False)
    with pytest.raises(RuntimeError, match="a row-wise copy cannot be made"):
        columns.update_usage(rowwise_usage=True)


def test_another_nominal_dtype_of_the_same_data(x):
    made = FORMATS["MXFP8Tensor"]()(x)
    half = made.to_dtype(torch.bfloat16)
    assert half.dtype == torch.bfloat16 and made.dtype == torch.float32 and half._rowwise_data is made._rowwise_data
    assert torch.equal(half.dequantize(), made.dequantize().bfloat16())


@pytest.mark.parametrize("name", ["Float8Tensor", "Float8Tensor, current"])
def test_tensors_without_dimensions(name):
    quantizer, x = FORMATS[name](), torch.tensor(1.5)
    made = quantizer(x)
    assert made.shape == () and made.dequantize() == 1.5 and made._data.shape == made._transpose.shape == ()
    assert quantizer(x.view(1))._transpose.shape == (1,)
    empty = quantizer.make_empty((), device="cpu")
    assert empty.shape == () and quantizer.update_quantized(2 * x, empty).dequantize() == 3.0


@pytest.mark.parametrize("name", ["Float8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor"])
def test_column_wise_data_has_the_tensors_dimensions_with_the_last_one_first(name):
    made = FORMATS[name]()(torch.randn(2, 64, 32))
    data = made._transpose if name == "Float8Tensor" else made._columnwise_data
    assert data.shape == (32, 2, 32 if name == "NVFP4Tensor" else 64)
    assert data.data_ptr() == made.record.col_data.data_ptr()
    if name == "Float8Tensor":
        assert torch.equal(data, made._data.permute(2, 0, 1))


def test_column_wise_data_that_packs_across_rows_of_a_tensor_has_two_dimensions():
    assert FORMATS["NVFP4Tensor"]()(torch.randn(32, 1, 32))._columnwise_data.shape == (32, 16)


def test_what_a_function_saves(x):
    made = FORMATS["MXFP8Tensor"]()(x)

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            tensors, ctx.tensor_objects = te.prepare_for_saving(y, None, made)
            ctx.save_for_backward(*tensors, y)
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            (y, nothing, kept), behind = te.restore_from_func_ctx(ctx, return_saved_tensors=True)
            assert nothing is None and kept is made and len(behind) == 1 and ctx.tensor_objects is None
            with pytest.raises(AttributeError, match="tensor_objects"):
                te.restore_from_func_ctx(ctx)
            return dy * y

    y = x.clone().requires_grad_()
    Kept.apply(y).sum().backward()
    assert torch.equal(y.grad, x)
    assert te.restore_from_saved([None], (x,))[0] is x
    with pytest.raises(TypeError, match="Quantized"):
        te.prepare_for_saving(made.record)


def test_numbers_of_element_types():
    from te_dispatch.pytorch.tensor.dtypes import FP8BwdTensors, FP8FwdTensors, TE_DType, TE_DType_To_Torch

    assert te.DType.cast(7) is E4M3 and TE_DType[torch.bfloat16] is te.DType.kBFloat16
    assert all(TE_DType_To_Torch[number] is dtype for dtype, number in TE_DType.items())
    from te_dispatch.common.recipe import Float8CurrentScaling
    from te_dispatch.pytorch import LayerNormMLP, autocast

    layer = LayerNormMLP(64, 64, device="cpu")
    with autocast(recipe=Float8CurrentScaling()):
        layer(torch.randn(32, 64)).sum().backward()
    forward, backward = layer.quantizers["scaling_fwd"], layer.quantizers["scaling_bwd"]
    for one in (FP8FwdTensors.GEMM1_WEIGHT, FP8FwdTensors.GEMM2_INPUT):
        assert forward[one].dtype is E4M3
    assert forward[FP8FwdTensors.GEMM1_OUTPUT].dtype is E4M3 and len(backward) == FP8BwdTensors.GRAD_INPUT2 + 1
    for one in (FP8BwdTensors.GRAD_OUTPUT2, FP8BwdTensors.GRAD_INPUT2):
        assert backward[one].dtype is te.DType.kFloat8E5M2


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("wide", [None, 448, 256])
def test_what_nvfp4_says_of_its_scales(wide, rotated, x):
    """`_amax_rowwise` is what the tensor's scale stands for: the amax of the values, up to the rounding of two
    divisions and a product."""
    if wide and rotated:
        pytest.skip("no such cast")
    more = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": wide} if wide else {}
    made = te.NVFP4Quantizer(**more, with_rht=rotated, with_post_rht_amax=rotated)(x)
    assert made._row_scaled_nvfp4 is False and made._nvfp4_use_4over6 is bool(wide)
    assert made._nvfp4_e4m3_max == (wide or 448)
    assert made._amax_rowwise.shape == made._amax_columnwise.shape == (1,)
    assert made._amax_rowwise.dtype is torch.float32
    torch.testing.assert_close(made._amax_rowwise[0], x.abs().max(), rtol=3e-7, atol=0)
    assert (made._amax_columnwise == made._amax_rowwise).item() is not rotated
    made.update_usage(columnwise_usage=False)
    assert made._amax_columnwise is None
    zeros = te.NVFP4Quantizer(**more)(torch.zeros_like(x))
    assert zeros._amax_rowwise.item() == 6 * (wide or 448)
    with pytest.raises(AttributeError, match="_amax_rowwise"):
        _ = te.MXFP8Quantizer(E4M3)(x)._amax_rowwise
