# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention whose steps are kept gives the bits of attention that is worked out, and follows what it depends on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.core import scopes
from te_dispatch.pytorch.attention import dot_product
from te_dispatch.pytorch.attention.dot_product import DotProductAttention

from .worlds import without_capture

S, B, H, D = 6, 2, 3, 8
Tensors = list[torch.Tensor]


def _apart(x: torch.Tensor) -> dict[str, Any]:
    return dict(zip(("query_layer", "key_layer", "value_layer"), (x[0].clone(), x[1].clone(), x[2].clone())))


#: Random numbers (3, s, b, h, d) -> the operands of a call.
FORMS: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "apart": _apart,
    "three of one": lambda x: dict(zip(("query_layer", "key_layer", "value_layer"), x.movedim(0, 2).clone().unbind(2))),
    "qkv, 3hd": lambda x: {"qkv_layer": x.movedim(0, 2).clone()},
    "qkv, h3d": lambda x: {"qkv_layer": x.movedim(0, 3).clone(), "qkv_interleave_dim": -2},
    "q and kv": lambda x: {"query_layer": x[0].clone(), "kv_layer": x[1:].movedim(0, 2).clone()},
}


def made(**options: Any) -> DotProductAttention:
    return DotProductAttention(H, D, attention_dropout=0.0, **options)


def step(
    module: DotProductAttention, form: str, seed: int, gradient: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **arguments: Any,
) -> Tensors:  # fmt: skip
    """The output and the operands' gradients, of numbers of its own."""
    generator = torch.Generator().manual_seed(seed)
    given = FORMS[form](torch.randn(3, S, B, H, D, generator=generator))
    operands = [x.requires_grad_() for x in given.values() if isinstance(x, torch.Tensor)]
    out = module(**given, **arguments)
    dout = torch.randn(out.shape, generator=generator)
    out.backward(dout if gradient is None else gradient(dout))
    return [out.detach(), *[x.grad for x in operands]]


def equal(found: Tensors, expected: Tensors) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def captured(form: str = "qkv, h3d", **options: Any) -> DotProductAttention:
    module = made(**options)
    for seed in range(2):
        step(module, form, seed)
    (known,) = module._signatures
    assert known.captured.program.backwards
    return module


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("form", FORMS)
def test_captured_calls_have_the_bits_of_others(form: str, backend: str) -> None:
    with te_dispatch.using(attention=backend):
        module = captured(form)
        found = [step(module, form, seed) for seed in range(3)]
        assert len(module._signatures) == 1
        plain = made()
        with without_capture():
            assert all(equal(x, step(plain, form, seed)) for seed, x in enumerate(found)) and not plain._signatures


def test_packed_gradients_are_the_tensor_that_their_parts_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference puts them together once; the Function copies nothing."""
    stacks: list[Any] = []
    stack = torch.stack

    def counted(*args: Any) -> torch.Tensor:
        stacks.append(args)
        return stack(*args)

    with te_dispatch.using(attention="reference"):
        expected = step(made(), "qkv, h3d", 5)
        module = captured()
        monkeypatch.setattr(torch, "stack", counted)
        assert equal(step(module, "qkv, h3d", 5), expected)
    assert len(stacks) == 1


def test_parts_that_lie_in_another_order_are_joined_by_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one tensor, as large as the packed gradient, in which dk comes first."""
    from te_dispatch.pytorch.capture import program

    real = program.repeating

    def turned(grads: Any) -> Any:
        dk, dq, dv = torch.stack((grads.dk, grads.dq, grads.dv), 3).unbind(3)
        return grads._replace(dq=dq, dk=dk, dv=dv)

    def repeating(scope: Any, name: str, *args: Any, **how: Any) -> Any:
        found = real(scope, name, *args, **how)
        return found if name == "attention_fwd" else lambda *tensors: turned(found(*tensors))

    bwd = te_dispatch.ops.attention_bwd
    monkeypatch.setattr(program, "repeating", repeating)
    monkeypatch.setattr(
        "te_dispatch.pytorch.attention.function.ops.attention_bwd", lambda *a, **k: turned(bwd(*a, **k))
    )
    module = captured()
    found = [step(module, "qkv, h3d", seed) for seed in range(3)]
    monkeypatch.undo()
    assert all(equal(x, step(made(), "qkv, h3d", seed)) for seed, x in enumerate(found))


@pytest.mark.parametrize(
    "attribute, value",
    [("softmax_scale", 2.0), ("softcap", 0.5), ("attn_mask_type", "no_mask"), ("window_size", (1, 0)),
     ("softmax_type", "off-by-one"), ("qkv_format", "bshd")],
)  # fmt: skip
def test_an_attribute_that_is_set_ends_them(attribute: str, value: Any) -> None:
    module, fresh = captured(), made()
    setattr(module, attribute, value)
    setattr(fresh, attribute, value)
    for seed in range(3):
        assert equal(step(module, "qkv, h3d", seed), step(fresh, "qkv, h3d", seed))


@pytest.mark.parametrize(
    "arguments",
    [{"attn_mask_type": "no_mask"}, {"window_size": (1, 0)}, {"window_size": [1, 0]}, {"softcap": 0.5},
     {"qkv_format": "bshd"}, {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32)},
     {"core_attention_bias_type": "alibi"}, {"checkpoint_core_attention": True},
     {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.ones(1, H, S, S)}],
)  # fmt: skip
def test_other_arguments_are_another_kind(arguments: dict[str, Any]) -> None:
    module = captured()
    for seed in range(3):
        assert equal(step(module, "qkv, h3d", seed, **arguments), step(made(), "qkv, h3d", seed, **arguments))
        assert equal(step(module, "qkv, h3d", seed), step(made(), "qkv, h3d", seed))


def test_operands_that_look_otherwise_are_worked_out() -> None:
    module = captured("apart")
    assert equal(step(module, "three of one", 3), step(made(), "three of one", 3))
    for change in (
        lambda x: x.bfloat16(),
        lambda x: x[:4],
        lambda x: x[..., :2, :],
        lambda x: x.mT.contiguous().mT,
    ):
        q, k, v = (change(x) for x in torch.randn(3, S, B, H, D))
        try:
            expected = made()(q, k, v)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)[:20]):
                module(q, k, v)
        else:
            assert torch.equal(module(q, k, v), expected)
    q, k, v = torch.randn(3, S, B, H, D)
    with pytest.raises(ValueError, match="give query_layer"):
        captured()(query_layer=torch.randn(S, B, H, 3, D, requires_grad=True))
    v.requires_grad_()
    module(q, k, v).backward(torch.ones(S, B, H * D))
    grad, v.grad = v.grad, None
    made()(q, k, v).backward(torch.ones(S, B, H * D))
    assert torch.equal(v.grad, grad)


@pytest.mark.parametrize(
    "gradient",
    [lambda g: g.sum(0, keepdim=True).expand(S, -1, -1), lambda g: g.transpose(0, 1).clone().transpose(0, 1)],
)
def test_gradients_that_lie_otherwise_are_served(gradient: Any) -> None:
    module = captured()
    expected = step(made(), "qkv, h3d", 1, lambda g: gradient(g).contiguous())
    assert equal(step(module, "qkv, h3d", 1, gradient), expected)
    assert equal(step(module, "qkv, h3d", 1), step(made(), "qkv, h3d", 1))


def test_whoever_watches_sees_every_call() -> None:
    module, seen = captured(), []
    with scopes.observe(lambda operator, accepted, args, result: seen.append((operator.name, accepted.id))):
        step(module, "qkv, h3d", 0)
    with (
        te_dispatch.using(attention="reference"),
        scopes.observe(lambda operator, accepted, args, result: seen.append((operator.name, accepted.id))),
    ):
        step(module, "qkv, h3d", 0)
    assert [name for name, _ in seen] == ["attention_fwd", "attention_bwd"] * 2
    assert [name.partition(".")[0] for _, name in seen[2:]] == ["reference"] * 2


def test_the_backward_runs_under_the_forwards_policy() -> None:
    module, x = captured(), torch.randn(S, B, H, 3, D, requires_grad=True)
    with te_dispatch.using(attention="reference"):
        for _ in range(2):
            module(qkv_layer=x, qkv_interleave_dim=-2).backward(torch.ones(S, B, H * D))
        out = module(qkv_layer=x, qkv_interleave_dim=-2)
    x.grad = None
    out.backward(torch.ones(S, B, H * D))
    with te_dispatch.using(attention="reference"):
        y = x.detach().requires_grad_()
        made()(qkv_layer=y, qkv_interleave_dim=-2).backward(torch.ones(S, B, H * D))
    assert torch.equal(x.grad, y.grad)


def _implementation(out: torch.Tensor) -> str:
    """Of the forward that made an output."""
    node: Any = out.grad_fn
    return str(node.saved_by if node.program is None else node.program.attributes["saved_by"])


def test_a_call_without_gradients_before_does_not_matter() -> None:
    """Under another policy, or under the same: what is known is what the first training step did."""
    x = torch.randn(S, B, H, 3, D, requires_grad=True)

    def train(module: DotProductAttention) -> str:
        out = module(qkv_layer=x, qkv_interleave_dim=-2)
        out.backward(torch.ones(S, B, H * D))
        return _implementation(out).partition(".")[0]

    for first in ("torch", "reference"):
        module = made()
        with torch.no_grad(), te_dispatch.using(attention=first):
            module(qkv_layer=x, qkv_interleave_dim=-2)
        for _ in range(3):
            for backend in ("reference", "torch"):
                with te_dispatch.using(attention=backend):
                    assert train(module) == backend
        for _ in range(3):
            train(module)
        assert any(known.captured.program is not None for known in module._signatures)
    module = made()
    with torch.no_grad():
        module(qkv_layer=x, qkv_interleave_dim=-2)
    train(module), train(module)
    known, inference = module._signatures
    assert known.captured.program.backwards and not inference.captured.program.backwards


def test_hooks_checkpoints_and_second_derivatives() -> None:
    module, x = captured(), torch.randn(S, B, H, 3, D, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        expected = module(qkv_layer=x, qkv_interleave_dim=-2)
    assert len(kept) >= 3
    expected.backward(torch.ones(S, B, H * D))
    grad, x.grad = x.grad, None
    out = checkpoint(lambda t: module(qkv_layer=t, qkv_interleave_dim=-2), x, use_reentrant=False)
    out.backward(torch.ones(S, B, H * D))
    assert torch.equal(out, expected) and torch.equal(x.grad, grad)
    out = module(qkv_layer=x, qkv_interleave_dim=-2)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    with torch.no_grad():
        assert torch.equal(module(qkv_layer=x, qkv_interleave_dim=-2), expected)
    torch.use_deterministic_algorithms(True)
    try:
        seen = []
        with scopes.observe(lambda operator, accepted, args, result: seen.append(args)):
            module(qkv_layer=x, qkv_interleave_dim=-2)
        assert any(argument is True for argument in seen[0])
    finally:
        torch.use_deterministic_algorithms(False)


def test_copies_of_a_module_learn_for_themselves() -> None:
    module = captured()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not other._signatures
        assert equal(step(other, "qkv, h3d", 4), step(module, "qkv, h3d", 4))
    module.attention_dropout = 0.5
    te.capture_stats(reset=True)
    for seed in range(3):
        step(module, "qkv, h3d", seed)
    # A random state of its own for every call.
    assert te.capture_stats().hits == te.capture_stats().captures == 0
    assert te.capture_stats().misses == {"new signature": 1, "options of attention": 2}


@pytest.mark.parametrize("options", [{}, {"return_max_logit": True}, {"softmax_type": "learnable"}], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("form", FORMS)
def test_inference_is_checked_once(
    form: str, mode: Callable[[], Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And training beside it has a signature of its own."""
    module = made(**options)
    inputs = [FORMS[form](torch.randn(3, S, B, H, D)) for _ in range(3)]
    with without_capture(), mode():
        expected = [module(**given) for given in inputs]
    with mode():
        module(**inputs[0])
    if not options.get("return_max_logit"):
        step(module, form, 1)
    with mode():
        monkeypatch.setattr(dot_product, "check_operands", lambda *args: pytest.fail("checked again"))
        te.capture_stats(reset=True)
        found = [module(**given) for given in inputs]
    stats = te.capture_stats()
    assert (stats.hits, dict(stats.misses)) == ((0, {"options of attention": 3}) if options else (3, {}))
    for x, y in zip(found, expected, strict=True):
        assert equal(list(x), list(y)) if isinstance(x, tuple) else torch.equal(x, y)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_inference_is_replayed(mode: Callable[[], Any]) -> None:
    """With operands that take no gradient, too; a policy in between has its own implementation."""
    module, operands = made(), [torch.randn(3, S, B, H, D).unbind(0) for _ in range(4)]
    with without_capture(), mode():
        expected = [module(*given) for given in operands]
    te.capture_stats(reset=True)
    with mode():
        for given, out in zip(operands, expected, strict=True):
            assert torch.equal(module(*given), out)
            with te_dispatch.using(attention="reference"):
                assert torch.allclose(module(*given), out, atol=1e-5)
    stats = te.capture_stats()
    assert (stats.hits, stats.captures, dict(stats.misses)) == (6, 2, {"new signature": 2})
    assert not any(signature.captured.program.backwards for signature in module._signatures)


def test_what_inference_was_checked_for_is_checked_again() -> None:
    module = made()
    q, k, v = torch.randn(3, S, B, H, D).unbind(0)
    with torch.no_grad():
        for _ in range(2):
            module(q, k, v)
        with pytest.raises(ValueError, match="value_layer must have key_layer's tokens"):
            module(q, k, v[:3])
        with pytest.raises(ValueError, match=r"key_layer and value_layer must be torch\.float32"):
            module(q, k.half(), v)
        module.num_gqa_groups = 1
        with pytest.raises(ValueError, match="key_layer must end in"):
            module(q, k, v)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("given", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "bfloat16")]
)
def test_torch_autocast_decides_the_dtype(given: str, dtype: str, packed: bool) -> None:
    """As for PyTorch's scaled_dot_product_attention; gradients come in the operands' own."""
    module = made()
    x = torch.randn(S, B, H, 3, D).to(getattr(torch, given)).requires_grad_()

    def attend(x: torch.Tensor) -> torch.Tensor:
        return module(qkv_layer=x, qkv_interleave_dim=-2) if packed else module(*x.unbind(-2))

    with torch.autocast("cpu", dtype=getattr(torch, dtype)):
        outs = [attend(x) for _ in range(2)]
    expected = attend(x.detach().to(getattr(torch, dtype)))
    for out in outs:
        assert out.dtype is getattr(torch, dtype) and torch.equal(out, expected)
    outs[0].sum().backward()
    assert x.grad is not None and x.grad.dtype is x.dtype
