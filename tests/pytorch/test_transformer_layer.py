# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""TransformerLayer: equal to torch.nn's layer, equal to the composition of its own parts, and it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling
from te_dispatch.pytorch.attention.rotary import RotaryPositionEmbedding
from te_dispatch.pytorch.fp8.autocast import autocast
from te_dispatch.pytorch.modules.dropout_add import DropPath, dropout_add
from te_dispatch.pytorch.modules.gemm_module import GemmModule
from te_dispatch.pytorch.modules.multi_head_attention import MultiheadAttention
from te_dispatch.pytorch.modules.transformer_layer import TransformerLayer

from .attention_oracle import assert_within
from .bounds import Bounded

HIDDEN, FFN, HEADS, B, S = 32, 64, 4, 2, 6


def build(**options: Any) -> TransformerLayer:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    module = TransformerLayer(HIDDEN, FFN, HEADS, **{**defaults, **options})
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return module


def copied_from(theirs: torch.nn.TransformerEncoderLayer) -> dict[str, torch.Tensor]:
    """A torch.nn layer's parameters under our names, with one weight for query, key and value."""
    names = {
        "self_attention.layernorm_qkv.layer_norm": "norm1",
        "self_attention.layernorm_qkv": "self_attn.in_proj_",
        "self_attention.proj": "self_attn.out_proj",
        "layernorm_mlp.layer_norm": "norm2",
    }
    state = dict(theirs.state_dict())
    found = {}
    for ours, their in names.items():
        dot = "_" if ours.endswith("layer_norm") else "."
        for kind in ("weight", "bias"):
            found[f"{ours}{dot}{kind}"] = state[f"{their}{kind}" if their.endswith("_") else f"{their}.{kind}"]
    for ours, their in (("fc1", "linear1"), ("fc2", "linear2")):
        for kind in ("weight", "bias"):
            found[f"layernorm_mlp.{ours}_{kind}"] = state[f"{their}.{kind}"]
    return found


def test_it_equals_torchs_layer() -> None:
    torch.manual_seed(1)
    theirs = torch.nn.TransformerEncoderLayer(
        HIDDEN, HEADS, FFN, dropout=0.0, norm_first=True, batch_first=True,
        activation=lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    ).double()  # fmt: skip
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = build(fuse_qkv_params=True, qkv_weight_interleaved=False, attn_input_format="bshd")
    ours.load_state_dict(copied_from(theirs))
    x = torch.randn(B, S, HIDDEN)
    dout = torch.randn(B, S, HIDDEN)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    out = ours(leaf)
    out.backward(dout)
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    wanted = theirs(exact, src_mask=future)
    wanted.backward(dout.double())
    assert_within(out, wanted, FFN)
    assert_within(leaf.grad, exact.grad, FFN)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        same = [n for n, p in theirs.named_parameters() if p.shape == parameter.shape]
        match = [n for n in same if torch.equal(theirs.get_parameter(n).float(), parameter)]
        assert len(match) == 1, name
        assert_within(parameter.grad, gradients[match[0]], FFN + B * S, name)


def composed(layer: TransformerLayer, x: torch.Tensor, dropout: float, encoder: torch.Tensor | None) -> torch.Tensor:
    """The layer's formulas around its own parts, with residuals that do not pass through them."""
    for part in layer.modules():
        if isinstance(part, GemmModule | MultiheadAttention):
            part.passes_input = False

    def join(outputs: Any, residual: torch.Tensor) -> torch.Tensor:
        out, residual = outputs if isinstance(outputs, tuple) else (outputs, residual)
        return dropout_add(out, residual, dropout)

    if layer.parallel_attention_mlp:
        return dropout_add(layer.self_attention(x) + layer.layernorm_mlp(x), x, dropout)
    x = join(layer.self_attention(x), x)
    if encoder is not None:
        x = join(layer.inter_attention(x, encoder_output=encoder), x)
    x = join(layer.layernorm_mlp(x), x)
    return x if layer.layernorm is None else layer.layernorm(x)


class Wrapped(torch.nn.Module):
    """In a part's place, as an adapter is, and takes one tensor from it."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.part(*args, **kwargs).clone()


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_who_stands_between_a_layer_and_its_parts_sees_one_tensor(kind: str) -> None:
    layer, x, encoder = build(layer_type=kind), torch.randn(S, B, HIDDEN), torch.randn(7, B, HIDDEN)
    attentions = [layer.self_attention, layer.inter_attention] if kind == "decoder" else [layer.self_attention]
    names = ["layernorm_qkv", "layernorm_query"]
    owners = [*zip(attentions, names), (layer, "layernorm_mlp")]

    def run() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out = layer(leaf, encoder_output=encoder if kind == "decoder" else None)
        out.square().sum().backward()
        assert leaf.grad is not None
        return [out.detach(), leaf.grad]

    def passing() -> list[bool]:
        return [getattr(owner, name).passes_input for owner, name in owners]

    plain = run()
    assert passing() == [True] * len(owners)
    seen: list[Any] = []
    handles = [
        getattr(owner, name).register_forward_hook(lambda module, given, result: seen.append(result))
        for owner, name in owners
    ]
    hooked = run()
    assert passing() == [False] * len(owners)
    assert len(seen) == len(owners) and all(isinstance(result, torch.Tensor) for result in seen)
    for handle in handles:
        handle.remove()
    assert all(map(torch.equal, run(), plain)) and passing() == [True] * len(owners)
    for owner, name in owners:
        setattr(owner, name, Wrapped(getattr(owner, name)))
    wrapped = run()
    for found in (hooked, wrapped):
        assert torch.equal(found[0], plain[0])
        torch.testing.assert_close(found[1], plain[1], rtol=1e-5, atol=1e-5)  # added in another order


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decoder": {"layer_type": "decoder"},
    "post layernorm residual": {"apply_residual_connection_post_layernorm": True},
    "decoder, post layernorm residual": {
        "layer_type": "decoder", "apply_residual_connection_post_layernorm": True,
    },
    "output layernorm": {"output_layernorm": True},
    "parallel": {"parallel_attention_mlp": True},
    "rmsnorm": {"normalization": "RMSNorm", "zero_centered_gamma": True},
    "no bias": {"bias": False},
    "bshd": {"attn_input_format": "bshd"},
    "grouped": {"num_gqa_groups": 2, "qk_norm_type": "RMSNorm"},
}  # fmt: skip


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_it_is_the_composition_of_its_parts(variant: str, dropout: float) -> None:
    options = VARIANTS[variant]
    layer = build(hidden_dropout=dropout, attention_dropout=dropout, **options)
    x = torch.randn(S, B, HIDDEN, requires_grad=True)
    encoder = torch.randn(7, B, HIDDEN) if options.get("layer_type") == "decoder" else None

    def run(function: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        torch.manual_seed(4)
        out = function(*args, **kwargs)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    got = run(layer, x, **({} if encoder is None else {"encoder_output": encoder}))
    assert all(torch.equal(a, b) for a, b in zip(got, run(composed, layer, x, dropout, encoder), strict=True))


@pytest.mark.parametrize(
    "activation",
    ["gelu", "geglu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu"],
)
def test_activations_run_and_have_gradients(activation: str) -> None:
    layer = build(activation=activation)
    x = torch.randn(S, B, HIDDEN, requires_grad=True)
    out = layer(x)
    out.square().sum().backward()
    assert out.shape == x.shape and bool(out.isfinite().all())
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.layernorm_mlp.parameters())


def test_thd_equals_padded_bshd() -> None:
    dense = build(attn_input_format="bshd", self_attn_mask_type="padding_causal")
    packed = build(attn_input_format="thd", self_attn_mask_type="padding_causal")
    bounds = torch.tensor([0, 4, 4 + S], dtype=torch.int32)
    x = torch.randn(B, S, HIDDEN)
    valid = torch.arange(S) < torch.tensor([4, S])[:, None]
    freqs = RotaryPositionEmbedding(HIDDEN // HEADS)(S)
    whole = dense(x, attention_mask=~valid.view(B, 1, 1, S), rotary_pos_emb=freqs)
    rows = packed(x[valid], cu_seqlens_q=bounds, max_seqlen_q=S, rotary_pos_emb=freqs)
    assert_within(rows, whole[valid].double(), FFN)


def test_dropout_add_statistics_and_gradients() -> None:
    n, p = 4096, 0.25
    x = torch.ones(n, 16, requires_grad=True)
    residual = torch.full((n, 16), 5.0, requires_grad=True)
    torch.manual_seed(0)
    out = dropout_add(x, residual, p)
    kept = out.detach() != 5.0
    factor = Bounded(torch.tensor(1 / (1 - p))).rounded(2)  # the difference and the quotient
    wanted = factor + Bounded(torch.tensor(5.0))
    assert ((out.detach()[kept].double() - wanted.value).abs() <= wanted.error).all()
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    out.sum().backward()
    assert (Bounded(kept) * factor).holds(x.grad) and torch.equal(residual.grad, torch.ones(n, 16))
    torch.manual_seed(0)
    assert torch.equal(dropout_add(x, residual, p), out)


def test_hidden_dropout_only_in_training() -> None:
    layer = build(hidden_dropout=0.5)
    x = torch.randn(S, B, HIDDEN)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x)) and torch.equal(layer(x), build()(x))


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_drop_path_skips_whole_sequences(layout: str) -> None:
    count, rate = 400, 0.3
    x = torch.ones(2, count, 4) if layout == "sbhd" else torch.ones(count, 2, 4)
    bounds = torch.arange(0, 2 * count + 1, 2, dtype=torch.int32) if layout == "thd" else None
    x = x.flatten(0, 1) if layout == "thd" else x
    torch.manual_seed(0)
    out = DropPath(rate)(x, layout, bounds)
    rows = out.transpose(0, 1) if layout == "sbhd" else out.view(count, 2, 4)
    assert torch.equal(rows, rows[:, :1, :1].expand_as(rows)), "a sequence shares its fate"
    alive = rows[:, 0, 0] != 0.0
    assert (Bounded(alive) * Bounded(torch.tensor(1 / (1 - rate))).rounded(2)).holds(rows[:, 0, 0])
    assert abs(float(alive.double().mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / count) ** 0.5
    assert DropPath(rate).eval()(x, layout) is x


def test_drop_path_in_a_layer() -> None:
    """With both halves skipped for a sequence, the layer passes it through."""
    layer = build(drop_path_rate=0.9)
    x = torch.randn(S, 32, HIDDEN)
    torch.manual_seed(0)
    unchanged = (layer(x) == x).all(-1).all(0)
    assert 16 < int(unchanged.sum()) < 32
    assert torch.equal(layer.eval()(x), build().eval()(x))


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_a_drop_path_rate_of_one_skips_every_sequence(layout: str) -> None:
    """A rate that Transformer Engine takes; the gradients are zeros, too."""
    layer = build(drop_path_rate=1.0, attn_input_format=layout, self_attn_mask_type="padding_causal")
    shape = {"sbhd": (S, B), "bshd": (B, S), "thd": (B * S,)}[layout]
    x = torch.randn(*shape, HIDDEN, requires_grad=True)
    bounds = torch.arange(0, (B + 1) * S, S, dtype=torch.int32)
    out = layer(x, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=S, max_seqlen_kv=S)
    assert torch.equal(out, x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_reduces_the_loss(dtype: torch.dtype) -> None:
    layer = build(params_dtype=dtype, hidden_dropout=0.1, attention_dropout=0.1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    x, target = (torch.randn(S, B, HIDDEN).to(dtype) for _ in range(2))
    losses = []
    for _ in range(30):
        loss = (layer(x) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=4), Float8CurrentScaling()])
def test_fp8_training_follows_high_precision(recipe: Any) -> None:
    """E4M3 keeps four bits, so one product is off by 2^-4 at most; steps that small keep the loss curves together."""
    x, target = torch.randn(16, B, HIDDEN), torch.randn(16, B, HIDDEN)

    def losses(enabled: bool) -> list[float]:
        layer = build()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.2)
        found = []
        for _ in range(6):
            with autocast(enabled=enabled, recipe=recipe):
                out = layer(x)
            loss = (out - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    plain, quantized = losses(False), losses(True)
    assert plain != quantized and quantized[-1] < quantized[0]
    assert max(abs(a - b) / a for a, b in zip(plain, quantized)) < 2**-4


@pytest.mark.parametrize(
    "options", [{}, {"apply_residual_connection_post_layernorm": True}, {"output_layernorm": True}]
)
def test_the_layer_is_in_the_dtype_of_torch_autocast(options: dict[str, Any]) -> None:
    layer = build(hidden_dropout=0.1, **options)
    x = torch.randn(S, B, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_arguments_that_ask_for_nothing_are_accepted() -> None:
    """ub_* choose parts of an overlap that is off."""
    layer = build(ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=True, ub_bulk_dgrad=False, seq_length=9)
    x = torch.randn(S, B, HIDDEN)
    assert layer(x).shape == x.shape


REFUSED: dict[str, Any] = {
    "ub_tp_comm_overlap": True,
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_unsupported_arguments_name_themselves(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"TransformerLayer: {name}="):
        build(**{name: REFUSED[name]})


def test_errors_name_the_argument() -> None:
    x = torch.zeros(S, B, HIDDEN)
    with pytest.raises(NotImplementedError, match=r"TransformerLayer\.forward: inference_params="):
        build()(x, inference_params=object())
    with pytest.raises(ValueError, match="layer_type must be one of 'encoder', 'decoder', got 'both'"):
        build(layer_type="both")
    with pytest.raises(ValueError, match="parallel_attention_mlp=True needs"):
        build(parallel_attention_mlp=True, output_layernorm=True)
    with pytest.raises(ValueError, match="hidden_dropout must be"):
        build(hidden_dropout=1.5)
    with pytest.raises(ValueError, match="drop_path_rate must be"):
        build(drop_path_rate=-0.1)
    with pytest.raises(ValueError, match="drop_path_rate must be"):
        build(drop_path_rate=1.1)
    with pytest.raises(ValueError, match="encoder_output must be a tensor"):
        build(layer_type="decoder")(x)
    with pytest.raises(ValueError, match="normalization must be"):
        build(normalization="BatchNorm")
