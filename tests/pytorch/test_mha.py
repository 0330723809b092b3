# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""MultiheadAttention against the same computation in float64, written with plain matrix products."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from te_dispatch.pytorch.attention.rotary import RotaryPositionEmbedding
from te_dispatch.pytorch.modules.multi_head_attention import MultiheadAttention

from .attention_oracle import Rules, assert_within, sequence_attention
from .bounds import Bounded, BoundedNorm

HIDDEN, HEADS, D, B, S = 32, 4, 8, 2, 5


def rows_of(groups: int, interleaved: bool, count: int) -> list[torch.Tensor]:
    """Which rows of a fused weight make query, key and value (count 3), or key and value (count 2).

    Interleaved: for every group its heads / groups query heads, its key head, its value head; else all queries, all
    keys, all values.
    """
    per = HEADS // groups if count == 3 else 0
    parts: list[list[int]] = [[] for _ in range(count)]
    row = 0
    if interleaved:
        for _ in range(groups):
            for part, heads in zip(parts, ([per] if per else []) + [1, 1]):
                part.extend(range(row, row + heads * D))
                row += heads * D
    else:
        for part, heads in zip(parts, ([HEADS] if per else []) + [groups, groups]):
            part.extend(range(row, row + heads * D))
            row += heads * D
    return [torch.tensor(part) for part in parts]


def projections(
    module: MultiheadAttention, weights: dict[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(weight, bias) of query, key and value."""
    first = ("layernorm_qkv" if module.input_layernorm else "qkv") if module.attention_type == "self" else "key_value"
    if module.fuse_qkv_params:
        count = 3 if module.attention_type == "self" else 2
        rows = rows_of(module.num_gqa_groups, module.qkv_weight_interleaved, count)
        found = [(weights[f"{first}.weight"][r], weights[f"{first}.bias"][r]) for r in rows]
    else:
        names = ("query", "key", "value") if module.attention_type == "self" else ("key", "value")
        found = [(weights[f"{first}.{n}_weight"], weights[f"{first}.{n}_bias"]) for n in names]
    if module.attention_type == "cross":
        name = "layernorm_query" if module.input_layernorm else "query_layer"
        part = "query_" if module.input_layernorm and not module.fuse_qkv_params else ""
        found.insert(0, (weights[f"{name}.{part}weight"], weights[f"{name}.{part}bias"]))
    return found


def rotate(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x (s, h, d) with the angles of positions 0, 1, .. in every feature pair."""
    t = torch.arange(x.shape[0])[:, None].double() * 10000.0 ** (-torch.arange(0, D, 2).double() / D)
    u, v = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    cos, sin = t.cos()[:, None], t.sin()[:, None]
    turned = u * cos - v * sin, v * cos + u * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def normalize(x: torch.Tensor, kind: str | None, prefix: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    if kind is None:
        return x
    if kind == "L2Normalization":
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    if kind == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{prefix}.weight"]
    return torch.nn.functional.layer_norm(x, (D,), weights[f"{prefix}.weight"], weights[f"{prefix}.bias"], 1e-6)


def oracle(
    module: MultiheadAttention,
    weights: dict[str, torch.Tensor],
    x: torch.Tensor,
    source: torch.Tensor,
    rope: bool = False,
    norm: str | None = None,
    norm_first: bool = False,
    rules: Rules | None = None,
) -> torch.Tensor:
    """x, source: (b, s, hidden) float64."""
    if module.input_layernorm:
        name = "layernorm_qkv" if module.attention_type == "self" else "layernorm_query"
        gamma, beta = weights[f"{name}.layer_norm_weight"], weights[f"{name}.layer_norm_bias"]
        normed = torch.nn.functional.layer_norm(x, (HIDDEN,), gamma, beta, 1e-5)
        source = normed if source is x else source
        x = normed
    (wq, bq), (wk, bk), (wv, bv) = projections(module, weights)
    out = []
    for b in range(x.shape[0]):
        q = (x[b] @ wq.T + bq).unflatten(-1, (HEADS, D))
        k, v = ((source[b] @ w.T + bias).unflatten(-1, (-1, D)) for w, bias in ((wk, bk), (wv, bv)))
        if norm_first:
            q, k = normalize(q, norm, "q_norm", weights), normalize(k, norm, "k_norm", weights)
        if rope:
            q, k = rotate(q, module.rotary_pos_interleaved), rotate(k, module.rotary_pos_interleaved)
        if not norm_first:
            q, k = normalize(q, norm, "q_norm", weights), normalize(k, norm, "k_norm", weights)
        out.append(sequence_attention(q, k, v, rules or Rules(causal=True))[0].flatten(-2))
    return torch.stack(out) @ weights["proj.weight"].T + weights["proj.bias"]


def build(**options: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    module = MultiheadAttention(
        HIDDEN, HEADS, kv_channels=D, attention_dropout=0.0,
        **{"init_method": lambda w: torch.nn.init.normal_(w, std=0.2), **options},
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_().mul_(0.3).add_(1.0 if name.endswith("norm.weight") else 0.0)
    return module


def check(module: MultiheadAttention, oracle_options: dict[str, Any] | None = None, **call: Any) -> None:
    cross = module.attention_type == "cross"
    x = torch.randn(B, S, HIDDEN)
    source = torch.randn(B, 7, HIDDEN) if cross else x
    dout = torch.randn(B, S, HIDDEN)

    def arrange(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(0, 1) if module.qkv_format == "sbhd" else t

    leaf = arrange(x).clone().requires_grad_()
    if cross:
        call["encoder_output"] = arrange(source).clone().requires_grad_()
    module.zero_grad()
    out = module(leaf, **call)
    out.backward(arrange(dout))

    weights = {n: p.detach().double().requires_grad_() for n, p in module.named_parameters()}
    exact = x.double().requires_grad_()
    exact_source = source.double().requires_grad_() if cross else exact
    wanted = oracle(module, weights, exact, exact_source, **(oracle_options or {}))
    wanted.backward(dout.double())
    terms = HIDDEN + S + D
    assert_within(out.detach(), arrange(wanted.detach()), terms, "out")
    assert_within(leaf.grad, arrange(exact.grad), terms, "dx")
    if cross:
        assert_within(call["encoder_output"].grad, arrange(exact_source.grad), terms, "dencoder")
    for name, parameter in module.named_parameters():
        assert_within(parameter.grad, weights[name].grad, terms + B * S, name)


FUSIONS = [{"fuse_qkv_params": False}, {"fuse_qkv_params": True},
           {"fuse_qkv_params": True, "qkv_weight_interleaved": False}]  # fmt: skip


@pytest.mark.parametrize(
    "fusion, groups, norm, layout", list(itertools.product(FUSIONS, (HEADS, 2), (False, True), ("sbhd", "bshd")))
)
def test_self_attention(fusion: dict[str, bool], groups: int, norm: bool, layout: str) -> None:
    module = build(num_gqa_groups=groups, input_layernorm=norm, qkv_format=layout, **fusion)
    assert module.qkv_weight_interleaved is (fusion["fuse_qkv_params"] and fusion.get("qkv_weight_interleaved", True))
    check(module)


@pytest.mark.parametrize("fusion, groups, norm", list(itertools.product(FUSIONS, (HEADS, 2), (False, True))))
def test_cross_attention(fusion: dict[str, bool], groups: int, norm: bool) -> None:
    module = build(
        attention_type="cross", attn_mask_type="no_mask", num_gqa_groups=groups, input_layernorm=norm, **fusion
    )
    check(module, {"rules": Rules()})


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved: bool, groups: int, layout: str) -> None:
    module = build(num_gqa_groups=groups, rotary_pos_interleaved=interleaved, qkv_format=layout)
    freqs = RotaryPositionEmbedding(D, interleaved=interleaved)(S)
    check(module, {"rope": True}, rotary_pos_emb=freqs)
    check(module, {"rope": True}, rotary_pos_emb=(freqs, freqs))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["L2Normalization", "RMSNorm", "LayerNorm"])
def test_query_and_key_norms(kind: str, before: bool) -> None:
    module = build(qk_norm_type=kind, qk_norm_before_rope=before)
    freqs = RotaryPositionEmbedding(D)(S)
    check(module, {"rope": True, "norm": kind, "norm_first": before}, rotary_pos_emb=freqs)


def test_windows_and_softcap_reach_the_core() -> None:
    check(build(window_size=(1, 0)), {"rules": Rules(causal=True, window=(1, 0))})
    check(build(), {"rules": Rules(causal=True, softcap=0.3)}, softcap=0.3)
    check(build(), {"rules": Rules(bottom_right=True, window=(1, 1))}, attn_mask_type="no_mask", window_size=(1, 1))


def test_packed_sequences_attend_apart_and_count_positions_anew() -> None:
    """thd: each sequence gives what it gives alone, rotary positions included."""
    packed = build(qkv_format="thd", attn_mask_type="padding_causal")
    alone = build(qkv_format="bshd")
    alone.load_state_dict(packed.state_dict())
    freqs = RotaryPositionEmbedding(D)(S)
    x = torch.randn(3 + S, HIDDEN)
    bounds = torch.tensor([0, 3, 3 + S], dtype=torch.int32)
    out = packed(x, cu_seqlens_q=bounds, max_seqlen_q=S, rotary_pos_emb=freqs)
    for part, rows in zip(out.split([3, S]), x.split([3, S])):
        assert_within(part, alone(rows[None], rotary_pos_emb=freqs)[0].double(), HIDDEN)


def test_returns() -> None:
    x = torch.randn(S, B, HIDDEN)
    module = build(return_bias=True, input_layernorm=True, return_layernorm_output=True)
    contexts: list[torch.Tensor] = []
    module.core_attention.register_forward_hook(lambda module, args, result: contexts.append(result))
    out, bias, normed = module(x)
    plain = build(input_layernorm=True)
    plain.load_state_dict(module.state_dict())
    bounded = Bounded(contexts[0].flatten(0, 1)) @ Bounded(module.proj.weight).T + Bounded(bias)
    assert bounded.holds((out + bias).flatten(0, 1)) and bounded.holds(plain(x).flatten(0, 1))
    assert bias is module.proj.bias
    weights = module.layernorm_qkv
    parameters = weights.layer_norm_weight, weights.layer_norm_bias
    assert BoundedNorm(x.flatten(0, 1), *parameters, weights.eps).y.holds(normed.flatten(0, 1))


@pytest.mark.parametrize("rope", [False, True])
def test_recomputing_the_core_changes_nothing(rope: bool) -> None:
    module = build()
    module.core_attention.attention_dropout = 0.3
    x = torch.randn(S, B, HIDDEN, requires_grad=True)
    freqs = RotaryPositionEmbedding(D)(S) if rope else None

    def run(checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        out = module(x, rotary_pos_emb=freqs, checkpoint_core_attention=checkpointed)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True)))


def test_every_parameter_lives_on_the_device() -> None:
    module = build(
        device="meta", softmax_type="learnable", input_layernorm=True, qk_norm_type="LayerNorm",
        init_method=lambda w: None, output_layer_init_method=lambda w: None,
    )  # fmt: skip
    assert {n: p.device.type for n, p in module.named_parameters() if p.device.type != "meta"} == {}
    assert "core_attention.softmax_offset" in dict(module.named_parameters())


REFUSED: dict[str, Any] = {
    "ub_overlap_ag": True, "ub_overlap_rs": True,
    "ub_overlap_rs_dgrad": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True,
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_unsupported_arguments_name_themselves(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"MultiheadAttention: {name}="):
        build(**{name: REFUSED[name]})


def test_errors_name_the_argument() -> None:
    x = torch.zeros(S, B, HIDDEN)
    with pytest.raises(NotImplementedError, match=r"MultiheadAttention\.forward: inference_params="):
        build()(x, inference_params=object())
    with pytest.raises(ValueError, match="hidden_states must have 3 dimensions"):
        build()(x[0])
    with pytest.raises(ValueError, match="end in hidden_size=32, got shape"):
        build()(x[..., :8])
    with pytest.raises(ValueError, match="encoder_output must be a tensor"):
        build(attention_type="cross")(x)
    with pytest.raises(ValueError, match="qk_norm_type must be one of"):
        build(qk_norm_type="GroupNorm")
    with pytest.raises(ValueError, match="hidden_size must be a multiple of num_attention_heads=5"):
        MultiheadAttention(32, 5)
