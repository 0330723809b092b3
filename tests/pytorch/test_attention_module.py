# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""DotProductAttention beyond masks: biases, softmax types, packing, dropout, recomputation, errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch
from te_dispatch import ops
from te_dispatch.core.errors import NoImplementation, PolicyError
from te_dispatch.pytorch.attention.dot_product import DotProductAttention
from te_dispatch.pytorch.attention.inputs import shared_packing
from te_dispatch.pytorch.attention.masks import alibi_slopes_of

from .attention_oracle import Rules, alibi_slopes, assert_within, sequence_attention
from .bounds import Bounded

B, S, H, D = 2, 6, 4, 8


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(width_v: int = D, groups: int = H, s_kv: int = S) -> list[torch.Tensor]:
    shapes = ((B, S, H, D), (B, s_kv, groups, D), (B, s_kv, groups, width_v))
    return [randn(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


def check(module: DotProductAttention, rules: Rules, width_v: int = D, s_kv: int = S, **call: Any) -> None:
    """Output and all gradients, those of the bias and of the softmax offset among them, against the oracle."""
    groups = module.num_gqa_groups
    leaves = inputs(width_v, groups, s_kv)
    dout = randn(B, S, H, width_v, seed=7)
    bias = call.get("core_attention_bias")
    out = module(*leaves, **call)
    out.backward(dout.flatten(-2))

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_bias = None if bias is None else bias.detach().double().requires_grad_()
    parameter = dict(module.named_parameters()).get("softmax_offset")
    offset = None if parameter is None else parameter.detach().double().requires_grad_()
    whole = None if exact_bias is None else exact_bias.expand(B, H, S, s_kv)
    wanted = torch.stack(
        [sequence_attention(*(t[b] for t in exact), rules, None if whole is None else whole[b], offset)[0]
         for b in range(B)]
    )  # fmt: skip
    wanted.backward(dout.double())
    terms = S + s_kv + D
    assert_within(out.detach(), wanted.detach().flatten(-2), terms, "out")
    for name, leaf, reference in zip(("dq", "dk", "dv"), leaves, exact):
        assert_within(leaf.grad, reference.grad, terms, name)
    if bias is not None:
        assert_within(bias.grad, exact_bias.grad, terms * B * H, "dbias")
    if offset is not None:
        assert_within(parameter.grad, offset.grad, terms * B * S, "doffset")


def make(**options: Any) -> DotProductAttention:
    return DotProductAttention(H, options.pop("kv_channels", D), **{"qkv_format": "bshd", **options})


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_queries(groups: int) -> None:
    check(make(num_gqa_groups=groups), Rules(causal=True))


def test_a_value_head_of_its_own_width() -> None:
    check(make(kv_channels=(D, 16)), Rules(causal=True), width_v=16)


def test_softmax_scale() -> None:
    check(make(softmax_scale=0.7), Rules(causal=True, scale=0.7))


def test_softcap_from_constructor_and_call() -> None:
    check(make(softcap=0.5), Rules(causal=True, softcap=0.5))
    check(make(), Rules(causal=True, softcap=0.5), softcap=0.5)


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_softmax_types(softmax_type: str) -> None:
    module = make(softmax_type=softmax_type)
    if softmax_type == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(randn(H, seed=9))
    check(module, Rules(causal=True, softmax_type=softmax_type))


def test_the_offset_of_each_softmax_type() -> None:
    vanilla, fixed, learnable = (make(softmax_type=kind) for kind in ("vanilla", "off-by-one", "learnable"))
    assert vanilla.softmax_offset is None
    assert fixed.softmax_offset.shape == (H,) and fixed.softmax_offset.eq(0).all()
    assert list(fixed.state_dict()) == ["_extra_state"] and not list(fixed.parameters()) and not list(fixed.buffers())
    assert list(learnable.state_dict()) == ["softmax_offset", "_extra_state"]
    assert isinstance(learnable.softmax_offset, torch.nn.Parameter)


@pytest.mark.parametrize("shape", [(1, 1), (1, H), (B, H)])
@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias"])
def test_biases(bias_type: str, shape: tuple[int, int]) -> None:
    bias = randn(*shape, S, S, seed=11).requires_grad_()
    rules = Rules(causal=True, bias_type=bias_type)
    check(make(), rules, core_attention_bias_type=bias_type, core_attention_bias=bias)


@pytest.mark.parametrize("mask_type", ["causal", "causal_bottom_right", "no_mask"])
@pytest.mark.parametrize("s_kv", [S, 9])
def test_alibi(mask_type: str, s_kv: int) -> None:
    causal = mask_type != "no_mask"
    rules = Rules(causal=causal, bottom_right=mask_type != "causal", bias_type="alibi")
    check(make(attn_mask_type=mask_type), rules, s_kv=s_kv, core_attention_bias_type="alibi")


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 20])
def test_alibi_slopes(heads: int) -> None:
    assert torch.equal(alibi_slopes_of(heads, torch.device("cpu")), torch.tensor(alibi_slopes(heads)))


def test_max_logit_is_the_largest_visible_logit() -> None:
    leaves = inputs()
    out, largest = make(return_max_logit=True)(*leaves)
    each = [sequence_attention(*(t.detach().double()[b] for t in leaves), Rules(causal=True))[1] for b in range(B)]
    assert_within(largest, torch.stack(each).amax(0), D)
    assert out.shape == (B, S, H * D) and not largest.requires_grad


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("dim", [-3, -2])
def test_packed_tensors_equal_their_parts(layout: str, dim: int) -> None:
    module = make(qkv_format=layout)
    dout = randn(B, S, H * D, seed=3)
    whole = randn(B, S, *((3, H, D) if dim == -3 else (H, 3, D)), seed=2)
    apart = [t.contiguous().requires_grad_() for t in whole.unbind(dim)]
    out = module(*apart)
    out.backward(dout)
    wanted = torch.stack([t.grad for t in apart], dim)

    packed = whole.clone().requires_grad_()
    again = module(qkv_layer=packed, qkv_interleave_dim=dim)
    again.backward(dout)
    assert torch.equal(again, out) and torch.equal(packed.grad, wanted)

    q, kv = whole.select(dim, 0).clone().requires_grad_(), whole.narrow(dim, 1, 2).clone().requires_grad_()
    again = module(q, kv_layer=kv, qkv_interleave_dim=dim)
    again.backward(dout)
    assert torch.equal(again, out)
    assert torch.equal(torch.cat([q.grad.unsqueeze(dim), kv.grad], dim), wanted)

    views = whole.clone().requires_grad_()
    module(*views.unbind(dim)).backward(dout)
    assert torch.equal(views.grad, wanted)


def test_packing_is_recognized() -> None:
    base = torch.empty(B, S, 3, H, D)
    assert shared_packing(*base.unbind(2)) == "3hd"
    assert shared_packing(*torch.empty(B, S, H, 3, D).unbind(3)) == "h3d"
    assert shared_packing(*torch.empty(S, B, 3 * H * D).view(S, B, 3, H, D).unbind(2)) == "3hd"
    q = torch.empty(B, S, 2 * H, D)
    assert shared_packing(q, *torch.empty(B, S, 2, H, D).unbind(2)) == "2hd"
    assert shared_packing(q, *torch.empty(B, S, H, 2, D).unbind(3)) == "h2d"


def test_other_views_are_not_taken_for_packed() -> None:
    q, k, v = torch.empty(B, S, 3, H, D).unbind(2)
    assert shared_packing(q, v, k) is None
    assert shared_packing(k, q, v) is None
    assert shared_packing(q.clone(), k.clone(), v.clone()) is None
    assert shared_packing(*torch.empty(3, B, S, H, D).unbind(0)) is None
    assert shared_packing(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)) is None


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    """With q = 0 and v = 1 an output is the mean over 64 keys of kept / (1 - p): binomial, 64 * 1024 trials."""
    n, p = 64, 0.25
    q, v = torch.zeros(1, n, H, D), torch.ones(1, n, H, 1)
    module = make(kv_channels=(D, 1), attention_dropout=p, attn_mask_type="no_mask")
    torch.manual_seed(0)
    kept = torch.stack([module(q, q, v) for _ in range(4)]) * n * (1 - p)
    # n weights are summed; softmax rounds each, and 1 / (1 - p), and their product; then our factors round the sum.
    assert Bounded(kept.round()).rounded(n + 6).holds(kept), "weights are dropped whole"
    trials = kept.numel() * n
    deviation = (p * (1 - p) / trials) ** 0.5
    assert abs(float(kept.sum()) / trials - (1 - p)) < 5 * deviation
    spread = float(kept.var()) / (n * p * (1 - p))
    assert 0.8 < spread < 1.25, "rows are independent: variance of a binomial, 1024 samples, five deviations"


def test_dropout_follows_the_generator() -> None:
    module = make(attention_dropout=0.5)
    leaves = inputs()

    def run(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        out = module(*leaves)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first[0], other[0])
    assert torch.equal(module.eval()(*leaves), make()(*leaves)), "no dropout outside training"


def test_dropout_gradient_uses_the_forwards_elements() -> None:
    """Attention is linear in v for one set of dropped elements: out = P v, so v's gradient is P^T dout."""
    module = make(attention_dropout=0.5, kv_channels=(D, 1))
    q, k, v = (t.detach() for t in inputs(width_v=1))
    columns = []
    for j in range(S):
        torch.manual_seed(3)
        v = torch.zeros(B, S, H, 1)
        v[:, j] = 1.0
        columns.append(module(q, k, v))
    p = torch.stack(columns, -1)  # (b, i, h, j)
    assert (p == 0.0).sum() > S * S * H * B // 2, "causal, and half of the rest is dropped"
    v.requires_grad_()
    dout = randn(B, S, H, seed=5)
    torch.manual_seed(3)
    module(q, k, v).backward(dout)
    assert_within(v.grad.squeeze(-1), torch.einsum("bihj,bih->bjh", p.double(), dout.double()), S + D)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_attention_is_the_same_bit_for_bit(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make(attention_dropout=dropout)
    leaves = inputs()
    calls = []
    forward = ops.attention_fwd
    monkeypatch.setattr(ops, "attention_fwd", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))

    def run(checkpointed: bool) -> list[torch.Tensor]:
        calls.clear()
        torch.manual_seed(1)
        out = module(*leaves, checkpoint_core_attention=checkpointed)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    plain = run(False)
    assert len(calls) == 1
    recomputed = run(True)
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed))


def test_nothing_is_kept_without_gradients() -> None:
    module = make()
    assert module(*inputs()).grad_fn is not None
    with torch.no_grad():
        assert module(*inputs()).grad_fn is None
    assert module(*(t.detach() for t in inputs())).grad_fn is None


def test_bfloat16() -> None:
    """Rounded to eight bits of mantissa, outputs stay within the same rounding analysis."""
    leaves = [t.detach().bfloat16() for t in inputs()]
    wanted = torch.stack(
        [sequence_attention(*(t[b].double() for t in leaves), Rules(causal=True))[0] for b in range(B)]
    )
    out = make()(*leaves)
    assert out.dtype == torch.bfloat16
    assert_within(out, wanted.flatten(-2), S + D)


REFUSED_CALL: dict[str, Any] = {
    "inference_params": object(), "fp8_output": True, "bf16_backward": True, "num_splits": 2,
    "score_mod": lambda *a: None, "score_mod_bprop": lambda *a: None, "score_mod_tensors": {},
    "score_mod_bprop_tensors": {}, "thd_attention_policies": [1], "thd_attention_policy_dispatch": "first",
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED_CALL))
def test_unsupported_call_arguments_name_themselves(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"DotProductAttention.forward: {name}="):
        make()(*inputs(), **{name: REFUSED_CALL[name]})


Z = torch.zeros
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "heads": (lambda: make()(Z(B, S, 3, D), Z(B, S, H, D), Z(B, S, H, D)), "query_layer must end in"),
    "width": (lambda: make()(Z(B, S, H, D), Z(B, S, H, 4), Z(B, S, H, D)), "key_layer must end in"),
    "dims": (lambda: make()(Z(S, H, D), Z(B, S, H, D), Z(B, S, H, D)), "query_layer must be"),
    "batch": (lambda: make()(Z(B, S, H, D), Z(3, S, H, D), Z(3, S, H, D)), "key_layer must have query_layer's batch"),
    "values": (lambda: make()(Z(B, S, H, D), Z(B, S, H, D), Z(B, 5, H, D)), "value_layer must have key_layer's"),
    "dtype": (lambda: make()(Z(B, S, H, D), Z(B, S, H, D).half(), Z(B, S, H, D)), "must be torch.float32"),
    "nothing": (lambda: make()(), "got none of them"),
    "half": (lambda: make()(Z(B, S, H, D), Z(B, S, H, D)), "got query_layer, key_layer"),
    "packed": (lambda: make()(qkv_layer=Z(B, S, 2, H, D)), "qkv_layer must have size 3"),
    "interleave": (lambda: make()(qkv_layer=Z(B, S, 3, H, D), qkv_interleave_dim=1), "qkv_interleave_dim must be"),
    "mask type": (lambda: make(attn_mask_type="diagonal"), "attn_mask_type must be one of"),
    "format": (lambda: make(qkv_format="bhsd"), "qkv_format must be one of"),
    "window": (lambda: make(window_size=(-2, 0)), "window_size must be"),
    "groups": (lambda: make(num_gqa_groups=3), "num_gqa_groups must divide"),
    "dropout": (lambda: make(attention_dropout=1.0), "attention_dropout must be"),
    "softmax": (lambda: make(softmax_type="max"), "softmax_type must be one of"),
    "bias": (lambda: make()(*inputs(), core_attention_bias_type="pre_scale_bias"), "core_attention_bias must be a ten"),
    "stray bias": (lambda: make()(*inputs(), core_attention_bias=Z(1, 1, S, S)), "core_attention_bias must be None"),
    "bias type": (lambda: make()(*inputs(), core_attention_bias_type="both"), "core_attention_bias_type must be one"),
    "no mask": (lambda: make(attn_mask_type="padding")(*inputs()), "needs attention_mask, or cu_seqlens_q"),
    "mask dtype": (
        lambda: make(attn_mask_type="padding")(*inputs(), attention_mask=Z(B, 1, 1, S)), "attention_mask must be a bool"
    ),
    "mask shape": (
        lambda: make(attn_mask_type="padding")(*inputs(), attention_mask=Z(B, 1, S, S).bool()), "must have shape"
    ),
    "one mask": (
        lambda: make(attn_mask_type="padding")(*inputs(s_kv=9), attention_mask=Z(B, 1, 1, S).bool()), "a pair of masks"
    ),
    "arbitrary": (
        lambda: make(attn_mask_type="arbitrary")(*inputs(), attention_mask=Z(B, 1, 3, S).bool()), "broadcastable"
    ),
    "bounds dtype": (
        lambda: make(attn_mask_type="padding")(*inputs(), cu_seqlens_q=torch.tensor([0, 3, 6])),
        "cu_seqlens_q must be int32",
    ),
    "thd mask": (lambda: make(qkv_format="thd")(*(t[0] for t in inputs())), "must be a padding type"),
    "thd bounds": (
        lambda: make(qkv_format="thd", attn_mask_type="padding")(*(t[0] for t in inputs())),
        "cu_seqlens_q must be int32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(BAD))
def test_errors_name_the_argument(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("shape", [(1, 1, 1, S), (B, H, 1, S)])
def test_a_bias_with_one_row_for_all_queries(shape: tuple[int, ...]) -> None:
    bias = randn(*shape, seed=9).requires_grad_()
    whole = bias.detach().expand(*shape[:2], S, S).clone().requires_grad_()
    results = []
    for given in (bias, whole):
        leaves = inputs()
        out = make()(*leaves, core_attention_bias_type="post_scale_bias", core_attention_bias=given)
        out.sum().backward()
        results.append([out, *[leaf.grad for leaf in leaves]])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert torch.allclose(bias.grad, whole.grad.sum(2, keepdim=True), atol=1e-5)


def test_padding_between_sequences_without_bounds_of_it() -> None:
    module = make(qkv_format="thd", attn_mask_type="padding")
    lengths = torch.tensor([0, 2, 2 * S], dtype=torch.int32)
    q, k, v = (randn(2 * S, H, D, seed=n) for n in range(3))
    bounds = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "max_seqlen_q": 2 * S, "max_seqlen_kv": 2 * S}
    expected = module(q, k, v, **bounds)
    assert torch.equal(module(q, k, v, **bounds, pad_between_seqs=True), expected)
    assert torch.equal(module(q, k, v, **bounds, pad_between_seqs=True, cu_seqlens_q_padded=lengths), expected)


def test_switches_that_are_set_later_act_from_the_next_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Transformer Engine, which reads them whenever it chooses."""
    ran: list[str] = []

    def note(operator: Any, accepted: Any, *_: Any) -> None:
        if operator.name == "attention_fwd":
            ran.append(accepted.id)

    attention = DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type="no_mask")
    x = torch.randn(1, 16, 2, 8, requires_grad=True)

    def call() -> str:
        with te_dispatch.observe(note):
            attention(x, x, x).sum().backward()
        return ran[-1]

    assert {call() for _ in range(3)} == {"torch.sdpa_cpu"}
    for _ in range(3):
        attention(x, x, x).sum().backward()  # without an observer, so that the kind of step becomes known
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    attention(x, x, x).sum().backward()
    assert {call() for _ in range(3)} == {"torch.unfused_attention"}
    for value, error, message in (("0", NoImplementation, "UNFUSED_ATTN=0"), ("off", PolicyError, "UNFUSED_ATTN=off")):
        monkeypatch.setenv("NVTE_UNFUSED_ATTN", value)
        for _ in range(2):
            with pytest.raises(error, match=message):
                attention(x, x, x)
            with pytest.raises(error, match=message):
                call()
    monkeypatch.undo()
    assert call() == "torch.sdpa_cpu"
    monkeypatch.setattr("os.environ", {**os.environ, "NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"})
    assert call() == "torch.unfused_attention"
    monkeypatch.undo()
    assert call() == "torch.sdpa_cpu"


def test_a_variable_that_is_set_later_and_does_nothing_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attention, q = DotProductAttention(2, 32), torch.randn(16, 1, 2, 32)
    attention(q, q, q)
    with caplog.at_level("WARNING", "te_dispatch"):
        monkeypatch.setenv("NVTE_SET_LATER", "1")
        attention(q, q, q)
        monkeypatch.setenv("OF_ANOTHER_PROGRAM", "1")
        attention(q, q, q)
    said = [record.getMessage() for record in caplog.records if "NVTE_" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("NVTE_SET_LATER=1 has no effect")
