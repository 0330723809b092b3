# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Names, shapes and order of parameters against those that Transformer Engine 2.20.2's modules have.

``transformer_engine_parameters.jsonl`` was recorded from its own constructors, on a CPU: one module a line, parameters
in the order of ``named_parameters()``, as optimizers and their checkpoints number them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te

_RECORDED = [
    json.loads(line)
    for line in Path(__file__).with_name("transformer_engine_parameters.jsonl").read_text().splitlines()
]


def _built(record: dict[str, Any]) -> torch.nn.Module:
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in record["arguments"].items()}
    if record["class"] != "DotProductAttention":
        given["device"] = "cpu"
    module: torch.nn.Module = getattr(te, record["class"])(**given)
    return module


@pytest.mark.parametrize("name", sorted({record["class"] for record in _RECORDED}))
def test_parameters_are_those_of_transformer_engine(name: str) -> None:
    records = [record for record in _RECORDED if record["class"] == name]
    for record in records:
        found = {name: "x".join(map(str, p.shape)) for name, p in _built(record).named_parameters()}
        assert list(found.items()) == list(record["parameters"].items()), record["arguments"]


def test_enough_was_recorded() -> None:
    assert len(_RECORDED) > 100
    assert {record["class"] for record in _RECORDED} >= {
        "Linear",
        "LayerNormMLP",
        "MultiheadAttention",
        "TransformerLayer",
    }


def test_checkpoints_from_before_the_query_had_its_name() -> None:
    layer = te.TransformerLayer(64, 128, 4, layer_type="decoder", device="cpu")
    before = layer.state_dict()
    for name in ("weight", "bias"):
        key = "inter_attention.layernorm_query."
        before[f"{key}{name}"] = torch.randn_like(before[f"{key}query_{name}"])
        del before[f"{key}query_{name}"]
    layer.load_state_dict(before)
    assert torch.equal(layer.inter_attention.layernorm_query.query_weight, before[f"{key}weight"])
    assert torch.equal(layer.inter_attention.layernorm_query.query_bias, before[f"{key}bias"])
    assert f"{key}weight" in before  # the caller's own is left alone


def test_states_of_optimizers_follow_the_order() -> None:
    """By position: the moments of a bias must not become those of a weight."""
    layer = te.MultiheadAttention(64, 4, qk_norm_type="RMSNorm", device="cpu")
    names = [name for name, _ in layer.named_parameters()]
    assert names[:2] == ["q_norm.weight", "k_norm.weight"]
    split = [name for name in names if name.startswith("qkv.")]
    assert split == [f"qkv.{part}_{kind}" for kind in ("weight", "bias") for part in ("query", "key", "value")]
