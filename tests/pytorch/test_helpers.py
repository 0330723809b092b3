# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Small functions that frameworks import from Transformer Engine's `utils` and `constants`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.pytorch import constants, nvtx
from te_dispatch.pytorch.attention.masks import attention_mask_func, get_cu_seqlens
from te_dispatch.pytorch.fp8.saved_module import has_te_modules
from te_dispatch.pytorch.fp8.support import assert_dim_for_fp8_exec, check_dim_for_fp8_exec, check_gemm_dims
from te_dispatch.pytorch.modules.gemm_steps import cast_if_needed
from te_dispatch.pytorch.modules.init_methods import (
    get_default_init_method,
    init_method_constant,
    init_method_normal,
    scaled_init_method_normal,
)
from te_dispatch.pytorch.splitting import (
    SplitAlongDim,
    ceil_div,
    deinterleave_glu_tensor,
    divide,
    ensure_divisibility,
    interleave_glu_tensor,
    round_up_to_nearest_multiple,
    split_tensor_along_dim,
)

# -- constants ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", constants.AttnMaskTypes)
def test_every_mask_and_bias_type_is_taken(mask: str) -> None:
    assert te.DotProductAttention(2, 16, attn_mask_type=mask).attn_mask_type == mask


def test_every_other_value_is_taken() -> None:
    for kind in constants.AttnTypes:
        te.DotProductAttention(2, 16, attention_type=kind)
        te.MultiheadAttention(32, 2, attention_type=kind, device="cpu")
    for kind in constants.LayerTypes:
        te.TransformerLayer(32, 32, 2, layer_type=kind, device="cpu")
    for mode in constants.GemmParallelModes:
        te.Linear(32, 32, parallel_mode=mode, device="cpu")
    q = torch.randn(4, 1, 2, 16)
    attention = te.DotProductAttention(2, 16, attn_mask_type="causal")
    for kind in constants.AttnBiasTypes:
        bias = None if kind in ("no_bias", "alibi") else torch.zeros(1, 2, 4, 4)
        attention(q, q, q, core_attention_bias_type=kind, core_attention_bias=bias)
    assert constants.dist_group_type is torch.distributed.ProcessGroup
    assert (constants.MXFP8_BLOCK_SCALING_SIZE, constants.NVFP4_BLOCK_SCALING_SIZE) == (32, 16)


# -- initialization -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "std"),
    [
        (init_method_normal(0.5), 0.5),
        (scaled_init_method_normal(0.5, 8), 0.5 / math.sqrt(16)),
        (get_default_init_method(), 0.023),
    ],
)
def test_normal_initialization_has_its_deviation(init: Any, std: float) -> None:
    torch.manual_seed(0)
    linear = te.Linear(256, 256, init_method=init, device="cpu", params_dtype=torch.float32)
    weight = linear.weight.detach()
    # The deviation of n samples is off by std / sqrt(2 n), one in 362 here; six of those.
    assert abs(float(weight.std()) / std - 1) < 6 / 362 and abs(float(weight.mean())) < 6 * std / 256


def test_constant_initialization() -> None:
    for value in (0.0, 1.0, -2.5):
        assert torch.equal(init_method_constant(value)(torch.empty(3)), torch.full((3,), value))


# -- splitting ----------------------------------------------------------------------------------------------------


def test_sizes_divide_or_raise() -> None:
    assert divide(12, 4) == 3
    for function in (divide, ensure_divisibility):
        with pytest.raises(ValueError, match="13 is not divisible by 4"):
            function(13, 4)


def test_sizes_are_rounded_up() -> None:
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [round_up_to_nearest_multiple(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    for function in (ceil_div, round_up_to_nearest_multiple):
        with pytest.raises(ValueError, match="must not be 0"):
            function(1, 0)


def test_a_tensor_is_split_into_views_or_copies() -> None:
    x = torch.arange(24.0).view(4, 6)
    parts = split_tensor_along_dim(x, 1, 3)
    assert [part.data_ptr() for part in parts] == [x[:, i:].data_ptr() for i in (0, 2, 4)]
    copies = split_tensor_along_dim(x, -1, 3, contiguous_split_chunks=True)
    assert all(copy.is_contiguous() and torch.equal(copy, part) for copy, part in zip(copies, parts))
    with pytest.raises(ValueError, match="6 is not divisible by 4"):
        split_tensor_along_dim(x, 1, 4)


@pytest.mark.parametrize("sections", [2, [1, 3, 2], (6,)])
@pytest.mark.parametrize("dim", [1, -2])
def test_split_along_dim_is_differentiable(sections: Any, dim: int) -> None:
    x = torch.randn(4, 6, 3, dtype=torch.float64, requires_grad=True)
    parts = SplitAlongDim.apply(x, dim, sections)
    assert all(torch.equal(part, own) for part, own in zip(parts, torch.split(x, sections, dim), strict=True))
    assert torch.autograd.gradcheck(lambda t: SplitAlongDim.apply(t, dim, sections), (x,))


def test_split_along_dim_squeezes() -> None:
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    parts = SplitAlongDim.apply(x, 1, 1, True)
    assert [part.shape for part in parts] == [(4, 2)] * 3
    assert torch.autograd.gradcheck(lambda t: SplitAlongDim.apply(t, 1, 1, True), (x,))
    with pytest.raises(ValueError, match=r"squeeze=True needs parts of size 1 along dim 1, got \[2, 1\]"):
        SplitAlongDim.apply(x, 1, 2, True)
    with pytest.raises(IndexError):
        SplitAlongDim.apply(x, 5, 1)


GAPS = torch.randn(4, 9)


def gradient_of_split(*grads: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(4, 6, requires_grad=True)
    (found,) = torch.autograd.grad(SplitAlongDim.apply(x, 1, [2, 3, 1]), x, grads)
    return found


def test_gradients_that_are_parts_of_one_tensor_are_joined_without_a_copy() -> None:
    whole = torch.randn(4, 6)
    parts = whole.split([2, 3, 1], dim=1)
    joined = gradient_of_split(*parts)
    assert joined.data_ptr() == whole.data_ptr() and torch.equal(joined, whole)


@pytest.mark.parametrize(
    "grads",
    [
        [torch.randn(4, n) for n in (2, 3, 1)],
        [torch.randn(4, 6).split([2, 3, 1], dim=1)[i] for i in range(3)],  # at the right places of three tensors
        [part.contiguous() for part in torch.randn(4, 6).split([2, 3, 1], dim=1)],
        torch.randn(4, 12)[:, ::2].split([2, 3, 1], dim=1),  # joined all the same
        [GAPS[:, i : i + n] for i, n in ((0, 2), (3, 3), (6, 1))],
        [GAPS[:, i : i + n] for i, n in ((3, 2), (0, 3), (5, 1))],
        [GAPS[:, 2:4], GAPS[:, 4:7].bfloat16().float(), GAPS[:, 7:8]],
        [torch.ones(()).expand(4, n) for n in (2, 3, 1)],  # one element for all
        torch.as_strided(torch.randn(9), (4, 6), (1, 1)).split([2, 3, 1], dim=1),  # rows that overlap
    ],
)
def test_other_gradients_are_joined_to_the_same_values(grads: Any) -> None:
    assert torch.equal(gradient_of_split(*grads), torch.cat(list(grads), dim=1))


def test_second_derivatives_of_a_split_see_all_parts() -> None:
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    # The gradient of a concatenation is split into parts of one tensor.
    assert torch.autograd.gradgradcheck(lambda t: torch.cat(SplitAlongDim.apply(t.square(), 1, 2), 1).exp(), (x,))


def test_quantized_tensors_are_split_by_value() -> None:
    linear = te.Linear(32, 32, device="cpu", params_dtype=torch.float32)
    with te.autocast(recipe=te.get_default_recipe()):
        out = linear(torch.randn(16, 32), fp8_output=True)
    assert isinstance(out, te.QuantizedTensor)
    parts = SplitAlongDim.apply(out, 1, 16)
    assert torch.equal(torch.cat(parts, 1), out.dequantize())
    sum(part.sum() for part in parts).backward()
    assert linear.weight.grad is not None


def test_gated_rows_are_interleaved_and_back() -> None:
    gate, value = torch.arange(8), 100 + torch.arange(8)
    mixed = interleave_glu_tensor(torch.cat((gate, value)), 4)
    assert mixed.tolist() == [0, 1, 2, 3, 100, 101, 102, 103, 4, 5, 6, 7, 104, 105, 106, 107]
    assert torch.equal(deinterleave_glu_tensor(mixed, 4), torch.cat((gate, value)))
    weight = torch.randn(24, 5, requires_grad=True)
    assert torch.equal(deinterleave_glu_tensor(interleave_glu_tensor(weight, 2), 2), weight)
    for function in (interleave_glu_tensor, deinterleave_glu_tensor):
        with pytest.raises(ValueError, match="divisible by 2 \\* interleave_size = 10, got 24"):
            function(weight, 5)
        for wrong in (0, -1, 2.0, True):
            with pytest.raises(ValueError, match="interleave_size must be a positive int"):
                function(weight, wrong)


# -- the rest -----------------------------------------------------------------------------------------------------


def test_a_cast_has_a_gradient_even_without_grad_mode() -> None:
    x = torch.randn(3, requires_grad=True)
    assert cast_if_needed(x, torch.float32) is x and cast_if_needed(None, torch.float32) is None
    with torch.no_grad():
        y = cast_if_needed(x, torch.bfloat16)
    assert y is not None and y.dtype == torch.bfloat16 and y.requires_grad


def test_masked_scores_are_written() -> None:
    scores = torch.zeros(1, 1, 2, 2)
    assert attention_mask_func(scores, torch.tensor([[False, True], [False, False]])) is scores
    assert scores.flatten().tolist() == [0.0, -10000.0, 0.0, 0.0]


class Recorder:
    """In place of `torch.cuda.nvtx`, which builds for CPUs lack."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def range_push(self, message: str) -> None:
        self.calls.append(message)

    def range_pop(self) -> None:
        self.calls.append("pop")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, getattr(made, name))
    monkeypatch.setattr(nvtx, "_open", [])
    return made


def test_ranges_are_marked_where_the_variable_asks(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx.nvtx_range_push("unseen")
    nvtx.nvtx_range_pop("unseen")
    with nvtx.get_nvtx_range_context("unseen"):
        pass
    assert recorder.calls == []
    monkeypatch.setenv("NVTE_NVTX_ENABLED", "1")
    nvtx.nvtx_range_push("a")
    nvtx.nvtx_range_push("b")
    with pytest.raises(ValueError, match="the innermost range is 'b', not 'a'"):
        nvtx.nvtx_range_pop("a")
    nvtx.nvtx_range_pop("b")
    nvtx.nvtx_range_pop()
    with nvtx.get_nvtx_range_context("c"):
        pass
    assert recorder.calls == ["a", "b", "pop", "pop", "c", "pop"]
    with pytest.raises(RuntimeError, match="no range is open"):
        nvtx.nvtx_range_pop()
    monkeypatch.setenv("NVTE_NVTX_ENABLED", "yes")
    with pytest.raises(ValueError, match="NVTE_NVTX_ENABLED=yes: expected 0 or 1"):
        nvtx.nvtx_range_push("d")


# -- modules, operands, masks -------------------------------------------------------------------------------------


def test_modules_of_this_package_are_found() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    for module in (te.Linear(16, 16), te.RMSNorm(16), te.DotProductAttention(2, 16), te.TransformerLayer(16, 32, 2)):
        assert has_te_modules(module) and has_te_modules(torch.nn.Sequential(plain, module))
    assert not has_te_modules(plain)
    assert has_te_modules(lambda x: x)


def test_operands_of_fp8_products_are_checked() -> None:
    assert_dim_for_fp8_exec(torch.empty(2, 4, 32), torch.empty(8, 16))
    for shape in ((7, 16), (8, 24), (3, 4, 16)):
        with pytest.raises(ValueError, match=r"divisible by 16 and the product of the others by 8, got shape"):
            assert_dim_for_fp8_exec(torch.empty(8, 16), torch.empty(shape))
        assert not check_dim_for_fp8_exec(torch.empty(shape))
    assert check_dim_for_fp8_exec(torch.empty(8, 16)) and not check_dim_for_fp8_exec(torch.empty(2, 8, 16))
    check_gemm_dims(torch.empty(3, 4), torch.empty(5, 4), fp8=False)
    with pytest.raises(ValueError, match="inp and weight must end in the same dimension"):
        check_gemm_dims(torch.empty(8, 32), torch.empty(8, 16), fp8=False)
    with pytest.raises(ValueError, match="divisible by 16"):
        check_gemm_dims(torch.empty(3, 16), torch.empty(8, 16), fp8=True)


def test_padding_masks_become_cumulative_lengths() -> None:
    mask = torch.tensor([[False, False, True], [False, True, True], [True, True, True]]).view(3, 1, 1, 3)
    found = get_cu_seqlens(mask)
    assert found.dtype == torch.int32 and found.tolist() == [0, 2, 3, 3]
    with pytest.raises(ValueError, match=r"\(b, 1, 1, s\)"):
        get_cu_seqlens(mask.view(3, 3))
