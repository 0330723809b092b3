# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Decorators about compilation, and the elementwise functions beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.pytorch import jit

K = 64


def operands(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, K, dtype=dtype), torch.randn(K, dtype=dtype), torch.randn(4, K, dtype=dtype)


# -- dropout ------------------------------------------------------------------------------------------------------


def test_without_dropout_it_is_a_sum() -> None:
    x, bias, residual = operands(torch.float32)
    expected = residual + (x + bias)
    for result in (
        jit.bias_dropout_add(x, bias, residual, 0.5, False),
        jit.get_bias_dropout_add(False)(x, bias, residual, 0.5),
        jit.bias_dropout_add_fused_inference(x, bias, residual, 0.5),
        jit.bias_dropout_add_fused_inference_(x, bias, residual, 0.5),
        jit.bias_dropout_add_fused_train_(x, bias, residual, 0.0),
        jit.bias_dropout_add_fused_train(x, bias, residual, 0.0),
    ):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    "function",
    [jit.get_bias_dropout_add(True), jit.bias_dropout_add_fused_train, jit.bias_dropout_add_fused_train_],
)
def test_dropout_keeps_some_and_scales_them_with_gradients(function: Any) -> None:
    x, bias, residual = (tensor.requires_grad_() for tensor in operands(torch.float32))
    out = function(x, bias, residual, 0.5)
    dropped = (out - residual).detach()
    kept = dropped != 0
    assert 0 < int(kept.sum()) < kept.numel()
    torch.testing.assert_close(dropped, torch.where(kept, 2 * (x + bias), 0).detach(), atol=1e-5, rtol=1e-5)
    out.backward(torch.ones_like(out))
    assert torch.equal(x.grad, 2.0 * kept) and torch.equal(bias.grad, 2.0 * kept.sum(0))
    assert torch.equal(residual.grad, torch.ones_like(residual))


def test_training_has_gradients_under_no_grad_and_ignores_autocast() -> None:
    x, bias, residual = (tensor.requires_grad_() for tensor in operands(torch.float32))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = jit.bias_dropout_add_fused_train(x, bias, residual, 0.1)
        inference = jit.bias_dropout_add_fused_inference(x, bias, residual, 0.1)
    assert out.requires_grad and out.dtype == torch.float32
    assert not inference.requires_grad and inference.dtype == torch.float32
    with torch.no_grad():
        assert not jit.bias_dropout_add_fused_train_(x, bias, residual, 0.1).requires_grad


def test_warming_up_leaves_random_states_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    seen: list[tuple[str, torch.dtype, tuple[int, ...]]] = []

    def noted(name: str, function: Any) -> Any:
        def call(x: torch.Tensor, *others: Any) -> Any:
            seen.append((name, x.dtype, tuple(x.shape)))
            return function(x, *others)

        return call

    names = ("bias_dropout_add_fused_train", "bias_gelu_fused", "gelu_fused_", "bgrad_dgelu_fused")
    names += ("l2normalization_fwd_fused", "l2normalization_backward_fused")
    for name in names:
        monkeypatch.setattr(jit, name, noted(name, getattr(jit, name)))
    with torch.no_grad():  # gradients are on inside
        jit.warmup_jit_bias_dropout_add_all_dtypes(K, 4, 2)
        jit.warmup_jit_bias_gelu_all_dtypes(K, 4, 2)
        jit.warmup_jit_l2normalization_all_dtypes(K, 4, 2)
    monkeypatch.undo()
    assert torch.equal(torch.get_rng_state(), before)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    assert set(seen) == {
        (name, dtype, (4, 2, K) if "dropout" in name else (8, K)) for name in names for dtype in dtypes
    }
    jit.bias_dropout_add_fused_train(*operands(torch.float32), 0.1)
    assert not torch.equal(torch.get_rng_state(), before)


# -- gelu ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [True, False])
def test_gelu_and_its_gradients(with_bias: bool) -> None:
    x, bias, grad = operands()
    given = bias if with_bias else torch.empty(0, dtype=torch.float64)
    shifted = x + bias if with_bias else x
    cubic = (2 / torch.pi) ** 0.5 * (shifted + 0.044715 * shifted**3)
    torch.testing.assert_close(jit.bias_gelu_fused(x, given), 0.5 * shifted * (1 + torch.tanh(cubic)))
    x.requires_grad_()
    bias.requires_grad_()
    jit.bias_gelu_fused(x, bias if with_bias else None).backward(grad)
    dbias, dx = jit.bgrad_dgelu_fused(grad, x.detach(), given.detach())
    torch.testing.assert_close(dx, x.grad)
    if with_bias:
        torch.testing.assert_close(dbias, bias.grad)
    else:
        assert dbias is None


def test_gelu_alone_is_that_of_no_bias() -> None:
    x, _, grad = operands()
    assert torch.equal(jit.gelu_fused_(x), jit.bias_gelu_fused(x, None))
    assert torch.equal(jit.dgelu_fused_(grad, x), jit.bgrad_dgelu_fused(grad, x, None)[1])


def test_forms_that_leave_autocast_on_compute_the_same() -> None:
    x, bias, grad = operands()
    assert torch.equal(jit.bias_gelu_fused_(x, bias), jit.bias_gelu_fused(x, bias))
    for found, expected in zip(jit.bgrad_dgelu_fused_(grad, x, bias), jit.bgrad_dgelu_fused(grad, x, bias)):
        assert torch.equal(found, expected)
    y, r = jit.l2normalization_fwd_fused_(x, 0.5)
    assert torch.equal(y, jit.l2normalization_fused(x, 0.5)) and torch.equal(jit.l2normalization_fused_(x, 0.5), y)
    assert torch.equal(
        jit.l2normalization_backward_fused_(grad, x, r, 0.5), jit.l2normalization_backward_fused(grad, x, r, 0.5)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_rows_are_normalized_to_length_one(dtype: torch.dtype, eps: float) -> None:
    x, _, grad = (t.to(dtype) for t in operands())
    exact = x.double().requires_grad_()
    expected = exact / (exact.square().sum(-1, keepdim=True) + eps).sqrt()
    expected.backward(grad.double())
    y, factor = jit.l2normalization_fwd_fused(x, eps)
    gradient = jit.l2normalization_backward_fused(grad, x, factor, eps)
    assert y.dtype == gradient.dtype == dtype and factor.shape == (4, 1) and factor.dtype == torch.float32
    assert torch.equal(jit.l2normalization_fused(x, eps), y)
    limit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(y.double(), expected, rtol=limit, atol=limit / 16)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=limit, atol=limit)


# -- decorators ---------------------------------------------------------------------------------------------------


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", **options)


def test_a_function_is_compiled_at_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def compile(function: Any) -> Any:
        made.append(function)
        return lambda x: function(x) + 1

    monkeypatch.setattr(torch, "compile", compile)

    @jit.jit_fuser
    def twice(x: Any) -> Any:
        """Its documentation."""
        return 2 * x

    assert made == [] and twice.__name__ == "twice" and twice.__doc__ == "Its documentation."
    assert [twice(1), twice(2)] == [3, 5] and len(made) == 1


def test_a_function_to_be_fused_is_inlined_in_a_compiled_program() -> None:
    fused = jit.lazy_compile(lambda x: 2 * x)
    assert compiled(lambda x: fused(x) + 1, fullgraph=True)(torch.ones(2)).tolist() == [3.0, 3.0]


def seen_by_compiler(decorated: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a compiled caller holds the decorated function's steps."""
    try:
        compiled(lambda x: decorated(x, *args, **kwargs) + 1, fullgraph=True)(torch.ones(2))
    except torch._dynamo.exc.Unsupported:
        return False
    return True


def test_the_compiler_is_kept_out() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert seen_by_compiler(double)
    for recursive in (True, False):
        apart = jit.no_torch_dynamo(recursive=recursive)(double)
        assert not seen_by_compiler(apart) and apart(torch.ones(1)).item() == 2


def test_the_compiler_is_kept_out_of_the_calls_that_a_function_names() -> None:
    def reason(call: dict[str, Any]) -> str | None:
        return "big" if call.get("size", 0) > 2 else None

    @jit.no_torch_dynamo(when=reason)
    def double(x: torch.Tensor, size: int = 0) -> torch.Tensor:
        return 2 * x

    assert seen_by_compiler(double) and seen_by_compiler(double, 2) and not seen_by_compiler(double, 3)
    assert not seen_by_compiler(double, size=3)
    with pytest.warns(UserWarning, match="double runs outside of the compiled program: big"):
        assert compiled(lambda x: double(x, 3) + 1)(torch.ones(1)).item() == 3
    assert double(torch.ones(1), 3).item() == 2
    with pytest.raises(TypeError, match=r"takes \*args"):
        jit.no_torch_dynamo(when=reason)(lambda *args: None)
