# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Environment variables and `using`: what they ask for, and what is refused."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from te_dispatch.core.environment import Debug, debug_setting, environment_layers, using_layer
from te_dispatch.core.errors import PolicyError
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.manifest import Implementation, Manifest
from te_dispatch.core.operator import Operator
from te_dispatch.core.policy import Origin, Policy, Rule, Selector
from te_dispatch.core.policy.known import Known

ATTENTION = Operator(
    name="attention_fwd", version=1, family="attention", signature=inspect.Signature(), doc="", device="None", facts={},
    shape=lambda: None, companion=None,
)  # fmt: skip
H100 = DeviceFacts("cuda", "nvidia", "sm_90")


def texts(selectors: tuple[Selector, ...]) -> list[str]:
    return [s.text for s in selectors]


def test_nothing_set(known: Known) -> None:
    assert environment_layers({}, known) == []
    assert environment_layers({"TE_DISPATCH_PREFER": " ", "TE_DISPATCH_POLICY": "", "NVTE_FLASH_ATTN": ""}, known) == []


def test_prefer(known: Known) -> None:
    (layer,) = environment_layers({"TE_DISPATCH_PREFER": "gemm = triton, torch.matmul; attention=torch;"}, known)
    assert {rule.op: texts(rule.prefer) for rule in layer.rules} == {
        "gemm": ["triton", "torch.matmul"],
        "attention": ["torch"],
    }
    assert str(layer.rules[0].prefer[0].origin).startswith("TE_DISPATCH_PREFER=")


@pytest.mark.parametrize("value", ["*=torch;grouped_gemm=triton", "grouped_gemm=triton;*=torch"])
def test_prefer_does_not_depend_on_the_order_of_its_entries(known: Known, value: str) -> None:
    (layer,) = environment_layers({"TE_DISPATCH_PREFER": value}, known)
    first = next(rule for rule in layer.rules if rule.speaks_of("grouped_gemm", "gemm"))
    assert texts(first.prefer) == ["triton"]


def test_policy_by_name_and_by_file(known: Known, tmp_path: Path) -> None:
    (layer,) = environment_layers({"TE_DISPATCH_POLICY": "deterministic"}, known)
    assert layer.numerics.deterministic is True
    (tmp_path / "own.yaml").write_text("version: 1\nprefer: [torch]\n")
    (layer,) = environment_layers({"TE_DISPATCH_POLICY": str(tmp_path / "own.yaml")}, known)
    assert texts(layer.prefer) == ["torch"]


def test_layers_are_strongest_first(known: Known) -> None:
    environ = {"NVTE_FLASH_ATTN": "0", "TE_DISPATCH_POLICY": "portable", "TE_DISPATCH_PREFER": "gemm=torch"}
    names = [layer.name for layer in environment_layers(environ, known)]
    assert names == ["TE_DISPATCH_PREFER", "portable", "Transformer Engine's variables"]


@pytest.mark.parametrize(
    ("variable", "trait"),
    [
        ("NVTE_FLASH_ATTN", "flash_package"),
        ("NVTE_FUSED_ATTN", "vendor_library"),
        ("NVTE_UNFUSED_ATTN", "unfused"),
        ("NVTE_FUSED_ATTN_CK", "ck"),
        ("NVTE_FUSED_ATTN_AOTRITON", "aotriton"),
    ],
)
def test_switches_take_a_trait_out_of_attention(known: Known, variable: str, trait: str) -> None:
    assert environment_layers({variable: "1"}, known) == []
    (layer,) = environment_layers({variable: "0"}, known)
    (rule,) = layer.rules
    assert rule == Rule("attention", deny=(Selector(f"trait:{trait}"),))
    assert rule.deny[0].origin == Origin(f"{variable}=0")
    assert rule.speaks_of("attention_fwd", "attention") and not rule.speaks_of("softmax_fwd", "softmax")


def test_attention_that_no_switch_speaks_of_is_a_fast_kernel() -> None:
    traits = {
        "package": {"fused", "flash", "flash_package"}, "library": {"fused", "vendor_library"},
        "kernel": {"fused", "flash"}, "bare": set(), "plain": {"unfused"}, "judge": {"oracle"},
    }  # fmt: skip
    implementations = [
        Implementation("attention_fwd@1", name, "nowhere:nothing", traits=frozenset(of)) for name, of in traits.items()
    ]
    known = Known.of([Manifest("acme", 1, tuple(implementations))], {"attention_fwd": ATTENTION})

    def denied(**switches: str) -> set[str]:
        layers = environment_layers({f"NVTE_{name}_ATTN": value for name, value in switches.items()}, known)
        return {text for layer in layers for rule in layer.rules for text in texts(rule.deny)}

    assert denied(FLASH="0") == {"trait:flash_package"}
    assert denied(FUSED="0") == {"trait:vendor_library"}
    # As Megatron sets them for its attention_backend flash, fused and unfused.
    assert denied(FLASH="1", FUSED="0", UNFUSED="0") == {"trait:vendor_library", "trait:unfused"}
    assert denied(FLASH="0", FUSED="1", UNFUSED="0") == {"trait:flash_package", "trait:unfused"}
    others = {"acme.kernel", "acme.bare"}
    assert denied(FLASH="0", FUSED="0", UNFUSED="1") == {"trait:flash_package", "trait:vendor_library", *others}


def test_all_switches_off_leave_nothing(known: Known) -> None:
    off = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
    (layer,) = environment_layers(off, known)
    (nothing,) = [rule for rule in layer.rules if rule.allow is not None]
    assert nothing.allow == () and nothing.op == "attention"
    assert str(nothing.origin) == "NVTE_FLASH_ATTN=0, NVTE_FUSED_ATTN=0, NVTE_UNFUSED_ATTN=0"


@pytest.mark.parametrize(
    ("number", "served", "not_served"),
    [
        (
            "0",
            {"q.dtype": "bf16", "seqlen_q": 512, "seqlen_kv": 128},
            {"q.dtype": "bf16", "seqlen_q": 513, "seqlen_kv": 1},
        ),
        ("1", {"q.dtype": "fp16"}, {"q.dtype": "e4m3fn"}),
        ("2", {"q.dtype": "e4m3fnuz"}, {"q.dtype": "bf16"}),
    ],
)
def test_fused_backend(known: Known, number: str, served: dict[str, Any], not_served: dict[str, Any]) -> None:
    (layer,) = environment_layers({"NVTE_FUSED_ATTN_BACKEND": number}, known)
    (rule,) = layer.rules
    assert texts(rule.prefer) == ["trait:vendor_library"]
    assert all(condition.check(served, H100).holds for condition in rule.when)
    assert not all(condition.check(not_served, H100).holds for condition in rule.when)


def test_fused_backend_of_a_fused_attention_that_is_off(known: Known) -> None:
    (layer,) = environment_layers({"NVTE_FUSED_ATTN": "0", "NVTE_FUSED_ATTN_BACKEND": "1"}, known)
    assert [texts(rule.deny) for rule in layer.rules] == [["trait:vendor_library"]]


@pytest.mark.parametrize(
    ("variable", "operators"),
    [
        ("NVTE_USE_CAST_TRANSPOSE_TRITON", {"quantize", "quantize_dbias"}),
        ("NVTE_USE_DEQUANTIZE_TRITON", {"dequantize"}),
        ("NVTE_USE_LAYERNORM_TRITON", {"layernorm_fwd", "layernorm_bwd"}),
        ("NVTE_USE_RMSNORM_TRITON", {"rmsnorm_fwd", "rmsnorm_bwd"}),
    ],
)
def test_triton_is_preferred_on_amd(known: Known, variable: str, operators: set[str]) -> None:
    assert environment_layers({variable: "0"}, known) == []
    (layer,) = environment_layers({variable: "1"}, known)
    assert {rule.op for rule in layer.rules} == operators
    amd = DeviceFacts("cuda", "amd", "gfx942")
    for rule in layer.rules:
        assert texts(rule.prefer) == ["triton"] and rule.prefer[0].origin == Origin(f"{variable}=1")
        assert [all(condition.check({}, device).holds for condition in rule.when) for device in (amd, H100)] == [
            True,
            False,
        ]


def test_deterministic_attention_leaves_other_operators_alone(known: Known) -> None:
    assert environment_layers({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, known) == []
    (layer,) = environment_layers({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}, known)
    (rule,) = layer.rules
    # acme's gemm claims nothing either, but it is no attention.
    assert (rule.op, set(texts(rule.deny))) == ("attention", {"torch.sdpa_fwd", "torch.sdpa_bwd"})
    assert layer.numerics.deterministic is None


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("NVTE_FLASH_ATTN", "false", "NVTE_FLASH_ATTN=false: expected 0 or 1, got 'false'"),
        ("NVTE_FUSED_ATTN", "2", "NVTE_FUSED_ATTN=2: expected 0 or 1, got '2'"),
        ("NVTE_FUSED_ATTN_BACKEND", "3", "NVTE_FUSED_ATTN_BACKEND=3: expected 0, 1 or 2, got '3'"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "no", "expected 0 or 1, got 'no'"),
        ("TE_DISPATCH_PREFER", "gemm", "TE_DISPATCH_PREFER=gemm: cannot read 'gemm'; expected operator=backend"),
        ("TE_DISPATCH_PREFER", "gemm=", "cannot read 'gemm='"),
        ("TE_DISPATCH_PREFER", "gemm=torch,,triton", "cannot read 'gemm=torch,,triton'"),
        ("TE_DISPATCH_PREFER", "gem=torch", "'gem' is no operator and no family; did you mean 'gemm'?"),
        ("TE_DISPATCH_PREFER", "gemm=trition", "gemm: unknown backend 'trition'; did you mean 'triton'?"),
        ("TE_DISPATCH_PREFER", "gemm=torch;gemm=triton", "'gemm' is given twice"),
        ("TE_DISPATCH_POLICY", "portabel", "TE_DISPATCH_POLICY=portabel: 'portabel' is neither a shipped policy nor"),
        ("TE_DISPATCH_POLICY", "/gone.yaml", "TE_DISPATCH_POLICY=/gone.yaml: /gone.yaml: no such policy file"),
    ],
)
def test_unreadable_values(known: Known, variable: str, value: str, message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        environment_layers({variable: value}, known)


def test_debug() -> None:
    assert debug_setting({}) == Debug(False, 0)
    assert debug_setting({"NVTE_DEBUG": "0", "NVTE_DEBUG_LEVEL": "2"}) == Debug(False, 2)
    assert debug_setting({"NVTE_DEBUG": "1"}) == Debug(True, 0)
    for variable, value in (("NVTE_DEBUG", "true"), ("NVTE_DEBUG_LEVEL", "9")):
        with pytest.raises(PolicyError, match=f"{variable}={value}: expected 0"):
            debug_setting({variable: value})


def test_using_requires_and_prefers(known: Known) -> None:
    layer = using_layer(known, prefer={"attention": ["triton", "torch"]}, gemm="torch")
    assert layer == Policy(
        name=layer.name,
        rules=(
            Rule("gemm", require=(Selector("torch"),)),
            Rule("attention", prefer=(Selector("triton"), Selector("torch"))),
        ),
    )
    assert str(layer.rules[0].origin) == "using(gemm='torch', prefer={'attention': ['triton', 'torch']})"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "using() asks for nothing"),
        ({"gem": "torch"}, "'gem' is no operator and no family; did you mean 'gemm'?"),
        ({"gemm": "trition"}, "gemm: unknown backend 'trition'; did you mean 'triton'?"),
        ({"gemm": "torch.sdpa_fwd"}, "implements attention_fwd, which this rule does not speak of"),
        ({"gemm": 3}, "gemm takes a backend's or implementation's name, or a list of them, got 3"),
        ({"gemm": []}, "got []"),
        ({"prefer": {"attention": "trait:flsh"}}, "unknown trait 'flsh'; did you mean 'flash'?"),
    ],
)
def test_using_refuses(known: Known, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        using_layer(known, **arguments)
