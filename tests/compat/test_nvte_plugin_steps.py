# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The plugin's permutations, steps of optimizers, scales and products against formulas,
with the arguments that Transformer Engine's Python passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.compat.formulas import TWO_DTYPES, close, random, reference, served


@pytest.mark.parametrize("kept", [-1, 14])
def test_permuting_tokens(tex: Any, kept: int) -> None:
    """Choices sorted by expert, those of one expert in the order of tokens; with a limit, the last ones are dropped."""
    tokens, top_k = 10, 2
    x = random(tokens, 32)
    indices = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(t))[:2] for t in range(tokens)])
    order = indices.reshape(-1).argsort(stable=True)[: kept if kept > 0 else None]
    permuted, row_map, workspace = tex.moe_permute_fwd(x, tex.DType.kFloat32, indices.int(), kept, [], 20)
    assert workspace == [] and row_map.dtype == torch.int32 and row_map.shape == (top_k * tokens,)
    assert torch.equal(permuted, x[order // top_k])
    rows = torch.full((tokens * top_k,), -1)
    rows[order] = torch.arange(len(order))
    assert torch.equal(row_map.long(), rows.view(tokens, top_k).t().reshape(-1))

    dy = random(len(order), 32)
    gradient = tex.moe_permute_bwd(dy, tex.DType.kFloat32, row_map, torch.empty(0), tokens, top_k)
    close(gradient, torch.zeros(tokens, 32).double().index_add_(0, order // top_k, dy.double()))

    probs = random(tokens, top_k).abs()

    def formula(y: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        weighted = y * probs.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros(tokens, 32, dtype=y.dtype).index_add_(0, order // top_k, weighted)

    dout = random(tokens, 32)
    expected, dinput, dprobs = reference(formula, dout, permuted, probs)
    close(tex.moe_unpermute_fwd(permuted, tex.DType.kFloat32, row_map, probs, tokens, top_k), expected)
    ours = tex.moe_unpermute_bwd(dout, permuted, tex.DType.kFloat32, row_map, probs)
    for one, other in zip(ours, (dinput, dprobs), strict=True):
        close(one, other)
    assert served(tex) == {"moe_permute_fwd", "moe_permute_bwd", "moe_unpermute_fwd", "moe_unpermute_bwd"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_padding_rows(tex: Any, dtype: torch.dtype) -> None:
    x = torch.arange(7 * 8).view(7, 8).to(dtype)
    padded = torch.full((48, 8), 9, dtype=dtype)
    tex.fused_multi_row_padding(x, padded, [3, 0, 4], [16, 0, 32])
    expected = torch.zeros_like(padded)
    expected[:3], expected[16:20] = x[:3], x[3:]
    assert torch.equal(padded, expected)
    back = torch.empty_like(x)
    tex.fused_multi_row_unpadding(padded, back, [16, 0, 32], [3, 0, 4])
    assert torch.equal(back, x)
    assert served(tex) == {"fused_multi_row_padding", "fused_multi_row_unpadding"}


@pytest.mark.parametrize("adam_w", [False, True])
@pytest.mark.parametrize("with_masters", [False, True])
def test_adam(tex: Any, adam_w: bool, with_masters: bool) -> None:
    """Two steps beside PyTorch's own optimizers."""
    dtype = torch.bfloat16 if with_masters else torch.float32
    masters = [random(5, 7), random(11)]
    params = [p.to(dtype).clone() for p in masters]
    own = [torch.nn.Parameter(p.clone()) for p in masters]
    optimizer = (torch.optim.AdamW if adam_w else torch.optim.Adam)(own, 0.1, (0.8, 0.9), 1e-6, 0.2)
    moments = [[torch.zeros_like(p) for p in masters] for _ in range(2)]
    flag = torch.zeros(1, dtype=torch.int32)
    for step in (1, 2):
        grads = [random(5, 7, dtype=dtype) * step, random(11, dtype=dtype) - step]
        lists = [grads, params, *moments, *([masters] if with_masters else [])]
        tex.multi_tensor_adam(65536, flag, lists, 0.1, 0.8, 0.9, 1e-6, step, 1 if adam_w else 0, 1, 0.2)
        for p, g in zip(own, grads):
            p.grad = g.float()
        optimizer.step()
    for ours, expected in zip(masters if with_masters else params, own):
        close(ours, expected.detach())
    for ours, expected in zip(params, own):
        close(ours, expected.detach())
    assert served(tex) == {"multi_tensor_adam"}


@pytest.mark.parametrize("dtype", TWO_DTYPES)
def test_norms_of_lists(tex: Any, dtype: torch.dtype) -> None:
    tensors, flag = [random(5, 7, dtype=dtype), random(11, dtype=dtype)], torch.zeros(1, dtype=torch.int32)
    each = torch.stack([t.double().norm() for t in tensors])
    norm, none = tex.multi_tensor_l2norm(65536, flag, [tensors])
    close(norm, each.norm().view(1))
    assert none.numel() == 0 and flag.item() == 0
    norm, ours = tex.multi_tensor_l2norm(65536, flag, [tensors], True)
    close(ours, each)
    tensors[1][3] = torch.inf
    tex.multi_tensor_l2norm(65536, flag, [tensors], False)
    assert flag.item() == 1
    assert served(tex) == {"multi_tensor_l2norm"}


def test_scaling_lists(tex: Any) -> None:
    inputs, flag = [random(5, 7), random(11)], torch.zeros(1, dtype=torch.int32)
    outputs = [torch.empty_like(x, dtype=torch.bfloat16) for x in inputs]
    tex.multi_tensor_scale(65536, flag, [inputs, outputs], 0.3)
    for ours, x in zip(outputs, inputs):
        close(ours, x * 0.3)
    assert flag.item() == 0
    inputs[0][2, 3] = torch.nan
    tex.multi_tensor_scale(65536, flag, [inputs, outputs], 1.0)
    assert flag.item() == 1 and outputs[0].isnan().sum() == 1
    assert served(tex) == {"multi_tensor_scale"}


def test_amax(tex: Any) -> None:
    amax = torch.full((1,), 99.0)
    assert tex.compute_amax(torch.tensor([1.0, -3.5, 2.0]), amax) is None
    assert amax.item() == 3.5
    assert served(tex) == {"compute_amax"}


def test_delayed_scales(tex: Any) -> None:
    """Two histories of the buffer: the reduced amaxes take row 0, scales follow, rows roll."""
    histories = [torch.tensor([[1.0, 0.5], [4.0, 2.0], [3.0, 1.0]]), torch.tensor([[0.0], [8.0], [7.0]])]
    scales = [torch.ones(2), torch.full((1,), 5.0)]
    reduced = torch.tensor([2.0, 16.0, 0.0])
    tex.fused_amax_and_scale_update_after_reduction(reduced, histories, scales, "max", tex.DType.kFloat8E5M2, 1)
    assert scales[0].tolist() == [57344 / 2 / 4, 57344 / 2 / 16] and scales[1].tolist() == [5.0]
    assert histories[0].tolist() == [[0.0, 0.0], [3.0, 1.0], [2.0, 16.0]]
    assert histories[1].tolist() == [[0.0], [8.0], [7.0]]
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor([2.0, 4.0, 1.0]), histories, scales, "most_recent", tex.DType.kFloat8E4M3, 0
    )
    assert scales[0].tolist() == [224.0, 112.0] and scales[1].tolist() == [448.0]
    assert served(tex) == {"fused_amax_and_scale_update_after_reduction"}


@pytest.mark.parametrize("shape", [(6, 10), (2, 3, 10)])
def test_transposing_codes(tex: Any, shape: tuple[int, ...]) -> None:
    codes = torch.arange(60, dtype=torch.uint8).view(shape)
    assert torch.equal(tex.fp8_transpose(codes, tex.DType.kFloat8E4M3, out=None), codes.movedim(-1, 0))
    assert served(tex) == {"fp8_transpose"}


def _product(tex: Any, *args: Any, **kwargs: Any) -> Any:
    """generic_gemm as general_gemm calls it; `args` are A, transa, B, transb, out and those that follow."""
    names = ("out_dtype", "bias", "bias_dtype", "gelu", "gelu_in", "grad", "accumulate", "alpha")
    given = dict.fromkeys(names) | {"gelu": False, "grad": False, "accumulate": False, "alpha": 1.0} | kwargs
    bias_dtype = given["bias_dtype"] or tex.DType.kBFloat16
    return tex.generic_gemm(
        *args[:5], None, given["out_dtype"], given["bias"], bias_dtype, given["gelu"], given["gelu_in"], given["grad"],
        torch.empty(4), 4, given["accumulate"], False, comm_overlap=None, comm_type=None, extra_output=None,
        bulk_overlap=False, alpha=given["alpha"], beta=1.0 if given["accumulate"] else 0.0,
    )  # fmt: skip


def test_products(tex: Any) -> None:
    x, w, dy, bias = random(2, 6, 16), random(8, 16), random(2, 6, 8), random(8)
    y, *rest = _product(tex, w, True, x, False, None, bias=bias, bias_dtype=tex.DType.kFloat32)
    close(y, F.linear(x.double(), w.double(), bias.double()))
    assert rest == [None, None, None]
    dx = _product(tex, w, False, dy, False, None, grad=True, alpha=0.5)[0]
    close(dx, 0.5 * dy.double() @ w.double())
    x, dy = x.view(12, 16), dy.view(12, 8)
    dw, db, *_ = _product(tex, x, False, dy, True, None, bias=bias, bias_dtype=tex.DType.kFloat32, grad=True)
    close(dw, dy.double().t() @ x.double())
    close(db, dy.double().sum(0))
    main_grad = torch.ones(8, 16)
    out = _product(tex, x, False, dy, True, main_grad, grad=True, accumulate=True)[0]
    assert out is main_grad
    close(out, 1 + dy.double().t() @ x.double())
    out, _, before, _ = _product(tex, w, True, x, False, None, bias=bias, gelu=True, out_dtype=tex.DType.kFloat32)
    close(before, F.linear(x.double(), w.double(), bias.double()))
    close(out, F.gelu(F.linear(x.double(), w.double(), bias.double()), approximate="tanh"))
    assert served(tex) == {"generic_gemm"}


def test_a_weight_gradient_in_fp32_with_that_of_a_bias_in_bf16(tex: Any) -> None:
    x, dy, bias = random(12, 16, dtype=torch.bfloat16), random(12, 8, dtype=torch.bfloat16), random(8).bfloat16()
    main_grad = torch.zeros(8, 16)
    out, db, *_ = _product(tex, x, False, dy, True, main_grad, bias=bias, grad=True, accumulate=True)
    assert out is main_grad and db.dtype == torch.bfloat16
    close(out, dy.double().t() @ x.double())
    close(db, dy.double().sum(0))
    assert served(tex) == {"generic_gemm"}


class Float8TensorStorage:
    """What Transformer Engine's class of this name holds."""

    __module__ = "transformer_engine.pytorch.tensor.storage.float8_tensor_storage"

    def __init__(self, tex: Any, x: torch.Tensor, scale: float, copies: str, e5m2: bool = False) -> None:
        codes = (x * scale).to(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn)
        self.values = codes.float() / scale
        data = codes.view(torch.uint8)
        self._data = data if "row" in copies else None
        self._transpose = data.movedim(-1, 0).contiguous() if "column" in copies else None
        self._transpose_invalid = self._transpose is None
        self._scale_inv = torch.tensor([1 / scale])
        self._fp8_dtype = tex.DType.kFloat8E5M2 if e5m2 else tex.DType.kFloat8E4M3
        self._dtype = torch.bfloat16


@pytest.mark.parametrize("copies", ["row", "column", "row and column"])
def test_reading_fp8(tex: Any, copies: str) -> None:
    x = Float8TensorStorage(tex, random(2, 3, 16), 4.0, copies)
    assert torch.equal(tex.dequantize(x, tex.DType.kFloat32), x.values)
    assert torch.equal(tex.dequantize(x, tex.DType.kBFloat16), x.values.bfloat16())
    assert served(tex) == {"dequantize"}


def test_products_of_fp8(tex: Any) -> None:
    """The copies of each operand are those that Transformer Engine makes for products of one kind."""

    def fp8(*shape: int, copies: str, e5m2: bool = False) -> Float8TensorStorage:
        return Float8TensorStorage(tex, random(*shape), 2.0, copies, e5m2)

    bf16 = tex.DType.kBFloat16
    x, w = fp8(2, 16, 32, copies="row"), fp8(48, 32, copies="row")
    bias = random(48).bfloat16()
    y = _product(tex, w, True, x, False, None, out_dtype=bf16, bias=bias)[0]
    assert y.dtype == torch.bfloat16 and y.shape == (2, 16, 48)
    close(y, F.linear(x.values.double(), w.values.double(), bias.double()))
    w, dy = fp8(48, 32, copies="column"), fp8(2, 16, 48, copies="row", e5m2=True)
    close(
        _product(tex, w, False, dy, False, None, out_dtype=bf16, grad=True)[0], dy.values.double() @ w.values.double()
    )
    x, dy = fp8(16, 32, copies="column"), fp8(16, 48, copies="column", e5m2=True)
    main_grad = torch.ones(48, 32)
    assert _product(tex, x, False, dy, True, main_grad, grad=True, accumulate=True)[0] is main_grad
    close(main_grad, 1 + dy.values.double().t() @ x.values.double())
    assert served(tex) == {"generic_gemm"}


def test_products_of_fp8_without_the_copy_that_is_read_are_passed_on(tex: Any) -> None:
    x, w = (Float8TensorStorage(tex, random(16, 16), 2.0, copies) for copies in ("row", "column"))
    x._transpose, x._transpose_invalid = x._data.t().contiguous(), True
    assert _product(tex, w, True, x, False, None) == ("native", "generic_gemm")
    assert _product(tex, w, False, x, True, None) == ("native", "generic_gemm")
    assert _product(tex, x, True, x, False, None, gelu=True) == ("native", "generic_gemm")
    assert _product(tex, x, True, random(16, 16), False, None) == ("native", "generic_gemm")
    x._fp8_dtype = tex.DType.kByte
    assert tex.dequantize(x, tex.DType.kFloat32) == ("native", "dequantize")
    reasons = tex.__te_dispatch__.calls()
    assert set(reasons["generic_gemm"]["passed_on"]) == {
        "an operand without its row-wise copy in NT",
        "an operand without its column-wise copy in TN",
        "GELU or the gradient of a bias in FP8",
        "a Tensor",
    }
    assert not tex.__te_dispatch__.served
