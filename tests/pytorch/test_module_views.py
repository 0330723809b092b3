# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attributes of Transformer Engine's modules tell what modules do, and what is assigned to them holds or raises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, MXFP8BlockScaling
from te_dispatch.pytorch.distributed.rng_tracker import RngStatesTracker
from te_dispatch.pytorch.fp8.state_views import assert_warmed_up
from te_dispatch.pytorch.modules.classes import get_te_classes
from te_dispatch.pytorch.modules.dropout_add import DropPath

GEMMS: dict[str, Any] = {
    "Linear": lambda **how: te.Linear(32, 32, device="cpu", **how),
    "LayerNormLinear": lambda **how: te.LayerNormLinear(32, 32, device="cpu", **how),
    "LayerNormMLP": lambda **how: te.LayerNormMLP(32, 64, device="cpu", **how),
}


@pytest.mark.parametrize("name", GEMMS)
def test_attributes_of_a_gemm_module(name: str) -> None:
    module = GEMMS[name]()
    assert module.apply_bias and not GEMMS[name](bias=False).apply_bias and not GEMMS[name](return_bias=True).apply_bias
    overlaps = ["ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"]
    overlaps += ["ub_overlap_ag", "ub_overlap_rs"] if name == "LayerNormMLP" else ["ub_overlap_ag_fprop"]
    for overlap in overlaps:
        assert getattr(module, overlap) is False
        setattr(module, overlap, False)
        with pytest.raises(NotImplementedError, match=f"{name}: {overlap}=True is not supported yet, only"):
            setattr(module, overlap, True)
    assert module.symmetric_ar_type is None
    with pytest.raises(NotImplementedError, match="symmetric_ar_type='one_shot' is not supported yet"):
        module.symmetric_ar_type = "one_shot"
    calls: list[int] = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))
    assert len(module.wgrad_accumulation_and_reduce_hooks) == 1
    if name == "LayerNormMLP":
        assert module.size_per_partition == 64 and module.activation_params is None
        assert GEMMS[name](activation="clamped_swiglu", activation_params={"limit": 3.0}).activation_params == {
            "limit": 3.0,
            "alpha": 1.702,
        }
    else:
        assert module.parameter_split_sizes == [32]
        assert GEMMS[name](parameters_split={"a": 8, "b": 24}).parameter_split_sizes == [8, 24]
    if name != "Linear":
        assert GEMMS[name](return_layernorm_output_gathered=True).return_layernorm_output_gathered is True


def test_attributes_of_an_attention() -> None:
    module = te.MultiheadAttention(
        64, 4, num_gqa_groups=2, window_size=(3, 0), softcap=5.0, params_dtype=torch.bfloat16, device="cpu"
    )
    assert (module.hidden_size_per_attention_head, module.hidden_size_q, module.hidden_size_kv) == (16, 64, 32)
    assert (module.num_attention_heads_per_partition, module.num_gqa_groups_per_partition) == (4, 2)
    assert module.core_attention.num_gqa_groups_per_partition == 2 and module.params_dtype == torch.bfloat16
    assert (module.window_size, module.softcap, module.softmax_type) == ((3, 0), 5.0, "vanilla")
    assert module.bottom_right_diagonal is None and (module.cp_size, module.cp_rank) == (1, 0)
    module.fast_setattr("qkv_format", "bshd")
    assert module.qkv_format == "bshd" and copy.deepcopy(module).window_size == (3, 0)


def test_attributes_of_the_core_attention() -> None:
    tracker = RngStatesTracker()
    module = te.DotProductAttention(
        2, 16, get_rng_state_tracker=lambda: tracker, cp_comm_type="a2a", cp_global_ranks=[0]
    )
    assert module.rng_states_tracker is tracker and te.DotProductAttention(2, 16).rng_states_tracker is None
    assert (module.cp_comm_type, module.cp_global_ranks, module.cp_stream) == ("a2a", [0], None)
    assert module.load_balancing_strategy is te.CPLoadBalancingStrategy.DUAL_CHUNK_SWAP
    module.set_context_parallel_group(None, [1], None, "all_gather", te.CPLoadBalancingStrategy.NO_LOAD_BALANCE)
    assert (module.cp_comm_type, module.cp_global_ranks) == ("all_gather", [1])
    assert module.load_balancing_strategy is te.CPLoadBalancingStrategy.NO_LOAD_BALANCE
    module.fast_setattr("name", "core")
    assert module.name == "core"


def layer(kind: str = "encoder", **how: Any) -> te.TransformerLayer:
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "layer_type": kind, "device": "cpu"}
    return te.TransformerLayer(64, 128, 4, **options, **how)


def test_what_is_assigned_to_a_layer_holds_for_its_attention() -> None:
    x = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(1))
    expected, module = layer(window_size=(1, 0), softcap=2.0)(x), layer()
    assert not torch.equal(module(x), expected)
    module.window_size, module.softcap = (1, 0), 2.0
    assert torch.equal(module(x), expected) and module.self_attention.window_size == (1, 0)
    module.self_attention.window_size = None
    assert module.window_size is None and not torch.equal(module(x), expected)


def test_attributes_of_a_layer() -> None:
    encoder, decoder = layer(seq_length=9), layer("decoder", enc_dec_window_size=(2, 2))
    assert (encoder.kv_channels, encoder.seq_length, encoder.softmax_type) == (16, 9, "vanilla")
    assert encoder.bottom_right_diagonal is None and encoder.enc_dec_window_size is None
    assert decoder.enc_dec_window_size == (2, 2) and decoder.enc_dec_bottom_right_diagonal is None
    decoder.enc_dec_bottom_right_diagonal = False
    assert decoder.inter_attention.core_attention.bottom_right_diagonal is False
    with pytest.raises(AttributeError, match=r"only layer_type='decoder' has inter_attention\.window_size"):
        encoder.enc_dec_window_size = (1, 1)
    encoder.fast_setattr("name", "layer")
    assert encoder.name == "layer"


def test_a_layer_begins_delayed_scaling_anew() -> None:
    module = layer()
    with te.autocast(recipe=DelayedScaling()):
        module(torch.randn(16, 2, 64)).sum().backward()
    linear = module.self_attention.proj
    tensors = linear.get_fp8_meta_tensors()
    assert tensors is not None and not torch.equal(tensors["scaling_fwd"][0], torch.ones(2))
    module.reset_fp8_meta_tensors()
    tensors = linear.get_fp8_meta_tensors()
    assert tensors is not None and torch.equal(tensors["scaling_fwd"][0], torch.ones(2))


def test_every_module_is_of_a_listed_class() -> None:
    modules = (te.Linear(16, 16), te.RMSNorm(16), te.LayerNorm(16), te.DotProductAttention(2, 16), layer())
    assert all(isinstance(part, get_te_classes()) for part in (*modules, layer().self_attention))
    assert not isinstance(torch.nn.Linear(4, 4), get_te_classes())


def test_a_model_without_scales_is_not_warm() -> None:
    model = torch.nn.Sequential(te.Linear(32, 32, device="cpu"))
    assert_warmed_up(model)
    with te.autocast(recipe=MXFP8BlockScaling()):
        assert_warmed_up(model)
    with te.autocast(recipe=DelayedScaling()):
        with pytest.raises(AssertionError, match="Linear '0' has not run under DelayedScaling"):
            assert_warmed_up(model)
        model(torch.randn(32, 32)).sum().backward()
        assert_warmed_up(model)


def test_paths_are_dropped_along_the_first_dimension() -> None:
    torch.manual_seed(0)
    x, drop = torch.randn(64, 3, 5, 7), DropPath(0.5)
    out = drop(x)
    kept = out.flatten(1).any(1)
    assert 0 < int(kept.sum()) < 64 and torch.equal(out[kept], 2 * x[kept])
    assert drop.eval()(x) is x and DropPath()(x) is x
