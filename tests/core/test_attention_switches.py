# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer Engine's three attention switches on the installed backends, over described devices: the truth table."""

from __future__ import annotations

import itertools

import pytest

import te_dispatch
import te_dispatch.ops  # declares the operators
from te_dispatch.core.devices import describe_device
from te_dispatch.core.environment import environment_layers
from te_dispatch.core.errors import NoImplementation, PolicyError
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.policy import Policy, Selector, merge
from te_dispatch.core.resolve import resolve
from te_dispatch.core.scopes import MANAGER

torch = pytest.importorskip("torch")
for module in ("te_dispatch_reference", "te_dispatch_torch", "te_dispatch_triton", "te_dispatch_cuda"):
    pytest.importorskip(module)

SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
DEVICES = ("nvidia:sm_80", "nvidia:sm_90", "nvidia:sm_100", "amd:gfx90a", "amd:gfx942", "amd:gfx950", "cpu")
CALL = {"q.dtype": "bf16", "k.dtype": "bf16", "v.dtype": "bf16", "q.scaling": "none", "head_dim": 64, "head_dim_v": 64}
#: What switches speak of: everything else of attention is a fast kernel of neither kind, or the oracle.
PACKAGES = {"cuda.flash_attention_2", "cuda.flash_attention_3", "cuda.flash_attention_4"}
LIBRARIES = {
    "cuda.cudnn_attention", "cuda.cudnn_attention_deterministic", "cuda.cudnn_fp8_attention", "torch.sdpa_cudnn",
    "torch.sdpa_aotriton_flash", "torch.sdpa_aotriton_efficient", "rocm.aiter_attention",
}  # fmt: skip
UNFUSED = {"torch.unfused_attention", "torch.varlen_attention"}


def decided(environ: dict[str, str], device: str, operator: str = "attention_fwd", *more: Policy) -> list[str]:
    snapshot = MANAGER.snapshot
    policy = merge([*more, *environment_layers(environ, MANAGER.known())])
    decision = resolve(OPERATORS[operator], CALL, describe_device(snapshot, device), policy, snapshot)
    return [accepted.id for accepted in decision.accepted]


def kind(candidate: str) -> str:
    forward = candidate.removesuffix("_bwd")
    for name, of in (("flash", PACKAGES), ("fused", LIBRARIES), ("unfused", UNFUSED)):
        if forward in of:
            return name
    return "kernel"


def test_the_lists_of_this_test_are_the_manifests() -> None:
    known = MANAGER.known()
    of_attention = {name for name in known.serves if known.serves[name] & {"attention_fwd"}}
    trait = {"flash": "flash_package", "fused": "vendor_library", "unfused": "unfused"}
    for name in of_attention & known.traits_of.keys():
        assert {t for t in trait.values() if t in known.traits_of[name]} == {
            trait[k] for k in [kind(name)] if k in trait
        }


@pytest.mark.parametrize("operator", ["attention_fwd", "attention_bwd"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("values", list(itertools.product("01", repeat=3)), ids="".join)
def test_truth_table(values: tuple[str, ...], device: str, operator: str) -> None:
    flash, fused, unfused = (value == "1" for value in values)
    everything = decided({}, device, operator)
    on = {"flash": flash, "fused": fused, "unfused": unfused, "kernel": flash or fused}
    want = [candidate for candidate in everything if on[kind(candidate)]]
    assert decided(dict(zip(SWITCHES, values)), device, operator) == want
    assert bool(want) == any((flash, fused, unfused))
    assert not any(candidate.startswith("reference.") for candidate in everything)


def test_on_amd_the_vendors_libraries_come_before_triton() -> None:
    default = MANAGER.bindings.policy
    found = decided({}, "amd:gfx942", "attention_fwd", default)
    firsts = [next(i for i, one in enumerate(found) if word in one) for word in ("aotriton", "triton.", "unfused")]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("operator", ["attention_fwd", "attention_bwd"])
def test_amds_libraries_are_switched_one_by_one(operator: str) -> None:
    ck = {"NVTE_FUSED_ATTN_CK": "0"}
    assert not any("aiter" in candidate for candidate in decided(ck, "amd:gfx942", operator))
    everything = decided({}, "amd:gfx942", operator)
    without = [candidate for candidate in everything if "aotriton" not in candidate]
    assert without != everything
    assert decided({"NVTE_FUSED_ATTN_AOTRITON": "0"}, "amd:gfx942", operator) == without
    on_other_chips = decided({}, "nvidia:sm_90", operator)
    assert decided({"NVTE_FUSED_ATTN_AOTRITON": "0"}, "nvidia:sm_90", operator) == on_other_chips


@pytest.mark.parametrize(
    ("operator", "variable", "call"),
    [
        ("layernorm_fwd", "NVTE_USE_LAYERNORM_TRITON", {"x.dtype": "bf16", "gamma.dtype": "bf16"}),
        ("rmsnorm_bwd", "NVTE_USE_RMSNORM_TRITON", {"x.dtype": "bf16", "gamma.dtype": "bf16"}),
        ("quantize", "NVTE_USE_CAST_TRANSPOSE_TRITON", {"x.dtype": "bf16", "quantizer": "delayed"}),
        ("dequantize", "NVTE_USE_DEQUANTIZE_TRITON", {"x.scaling": "tensor"}),
    ],
)
def test_triton_switches_of_amd_outweigh_a_policy(operator: str, variable: str, call: dict[str, str]) -> None:
    snapshot = MANAGER.snapshot

    def first(environ: dict[str, str], device: str) -> str:
        weaker = Policy("portable first", prefer=(Selector("torch"),))
        policy = merge([*environment_layers(environ, MANAGER.known()), weaker])
        found = resolve(OPERATORS[operator], call, describe_device(snapshot, device), policy, snapshot)
        return found.accepted[0].id.partition(".")[0]

    assert first({}, "amd:gfx942") == "torch"
    assert first({variable: "1"}, "amd:gfx942") == "triton"
    assert first({variable: "1"}, "nvidia:sm_90") == "torch"


def test_what_megatron_sets_on_a_hopper_chip() -> None:
    def first(flash: str, fused: str, unfused: str) -> str:
        return decided(dict(zip(SWITCHES, (flash, fused, unfused))), "nvidia:sm_90")[0]

    assert kind(first("1", "0", "0")) == "flash"
    assert kind(first("0", "1", "0")) == "fused"
    assert kind(first("0", "0", "1")) == "unfused"


def test_the_vendor_s_libraries_on_amd_are_aiter_s_and_aotriton() -> None:
    for operator in ("attention_fwd", "attention_bwd"):
        everything = decided({}, "amd:gfx942", operator)
        fused = [candidate for candidate in everything if kind(candidate) == "fused"]
        half = "_bwd" if operator == "attention_bwd" else ""
        native = [candidate for candidate in fused if candidate.startswith("rocm.")]
        assert native in ([], [f"rocm.aiter_attention{half}"])
        assert fused[len(native) :] == [f"torch.sdpa_aotriton_{name}{half}" for name in ("flash", "efficient")]
        assert set(everything) - set(decided({"NVTE_FUSED_ATTN": "0"}, "amd:gfx942", operator)) == set(fused)


@pytest.mark.parametrize("release", "234")
def test_one_release_of_flash_attention_is_switched_by_its_own_variable(release: str) -> None:
    off = {f"NVTE_FLASH_ATTN_V{release}": "0"}
    for operator in ("attention_fwd", "attention_bwd"):
        everything = decided({}, "nvidia:sm_90", operator)
        gone = set(everything) - set(decided(off, "nvidia:sm_90", operator))
        assert gone == {f"cuda.flash_attention_{release}" + ("_bwd" if operator == "attention_bwd" else "")}
    # As Megatron asks for FlashAttention 2.
    others = {f"NVTE_FLASH_ATTN_V{n}": str(int(n == release)) for n in "234"}
    alone = decided({"NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0", **others}, "nvidia:sm_90")
    assert alone[0] == f"cuda.flash_attention_{release}" and PACKAGES & set(alone) == {alone[0]}


def test_a_policy_that_allows_something_is_stronger_than_switches_that_allow_nothing() -> None:
    off = dict.fromkeys(SWITCHES, "0")
    named = Policy(allow=(Selector("reference"),))
    assert decided(off, "cpu") == [] and decided({}, "cpu", "attention_fwd", named) == ["reference.attention_fwd"]


def test_all_off_is_an_error_with_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.setenv(name, "0")
    x = torch.randn(1, 8, 2, 16)
    try:
        te_dispatch.reload_environment()
        with pytest.raises(NoImplementation, match=r"NVTE_FLASH_ATTN=0, NVTE_FUSED_ATTN=0, NVTE_UNFUSED_ATTN=0"):
            te_dispatch.ops.attention_fwd(x, x, x, layout="bshd")
    finally:
        monkeypatch.undo()
        te_dispatch.reload_environment()


def test_the_oracle_serves_those_who_name_it() -> None:
    x = torch.randn(4, 8)
    with te_dispatch.policy(Policy(deny=(Selector("torch"), Selector("triton"), Selector("cuda")))):
        with pytest.raises(NoImplementation, match="must name 'reference'"):
            te_dispatch.ops.softmax_fwd(x)
        for selector in ("reference", "reference.softmax_fwd", "trait:oracle"):
            with te_dispatch.using(softmax_fwd=selector):
                assert te_dispatch.ops.softmax_fwd(x).shape == x.shape
            with te_dispatch.using(prefer={"softmax": selector}):
                assert te_dispatch.ops.softmax_fwd(x).shape == x.shape
        with te_dispatch.using(prefer={"gemm": "reference"}), pytest.raises(NoImplementation):
            te_dispatch.ops.softmax_fwd(x)
    with pytest.raises(PolicyError), te_dispatch.using(softmax_fwd="trait:oracel"):
        pass
