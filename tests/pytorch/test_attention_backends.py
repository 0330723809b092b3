# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`get_attention_backend` says what dispatch does."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import te_dispatch
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.pytorch import DotProductAttention
from te_dispatch.pytorch.attention import backends as attention_backends
from te_dispatch.pytorch.attention.backends import (
    AttentionParams,
    FlashAttentionUtils,
    FusedAttnBackend,
    check_set_window_size,
    get_attention_backend,
    get_qkv_format,
)

SMALL = AttentionParams(
    qkv_dtype=torch.float32, num_heads=4, num_gqa_groups=4, max_seqlen_q=8, max_seqlen_kv=8, head_dim_qk=16,
    head_dim_v=16, batch_size=2, softmax_scale=0.25,
)  # fmt: skip
NOTHING = (False, None, False, None, False, [False, False, False])


def asked(**changes):
    return dataclasses.replace(SMALL, **changes)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)


@pytest.fixture
def switches(monkeypatch):
    def set_to(flash, fused, unfused):
        for name, value in (("FLASH", flash), ("FUSED", fused), ("UNFUSED", unfused)):
            monkeypatch.setenv(f"NVTE_{name}_ATTN", str(value))

    yield set_to
    monkeypatch.undo()
    te_dispatch.reload_environment()


def called(**arguments):
    """The implementation that serves a call as `SMALL` says."""
    seen = []
    module = DotProductAttention(4, 16, attn_mask_type="no_mask", **arguments)
    q, k, v = (torch.randn(8, 2, 4, 16, requires_grad=True) for _ in range(3))
    with te_dispatch.observe(lambda operator, accepted, *_: seen.append((operator.name, accepted.id))):
        module(q, k, v)
    (one,) = (implementation for operator, implementation in seen if operator == "attention_fwd")
    return one


@pytest.mark.parametrize(
    ("setting", "kind", "available"),
    [
        ((1, 1, 1), "fused", [False, True, True]),
        ((0, 1, 1), "fused", [False, True, True]),
        ((1, 0, 1), "fused", [False, True, True]),  # PyTorch's kernel is neither a package nor the vendor's library
        ((0, 0, 1), "unfused", [False, False, True]),
        ((1, 0, 0), "fused", [False, True, False]),
        ((0, 0, 0), None, [False, False, False]),
    ],
)
def test_the_switches_decide_as_they_do_for_a_call(switches, setting, kind, available):
    switches(*setting)
    flash, version, fused, number, unfused, could = get_attention_backend(asked())
    assert (flash, version, number) == (False, None, None) and could == available
    assert (fused, unfused) == (kind == "fused", kind == "unfused")
    if kind is None:
        with pytest.raises(te_dispatch.NoImplementation):
            called()
    else:
        assert ("unfused" in called()) == unfused


LAYOUTS = ["sbh3d", "sb3hd", "sbhd_sb2hd", "sbhd_sbh2d", "sbhd_sbhd_sbhd", "bs3hd", "bshd_bsh2d", "bshd_bshd_bshd"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    assert get_attention_backend(asked(qkv_layout=layout))[5] == [False, True, True]
    assert get_qkv_format(layout) == ("sbhd" if layout.startswith("s") else "bshd",) * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_mask_type": "padding", "qkv_layout": "thd_thd_thd"},
        {"attn_mask_type": "padding_causal", "qkv_layout": "t3hd", "pad_between_seqs": True},
        {"attn_mask_type": "padding_causal_bottom_right", "qkv_layout": "bshd_bs2hd", "max_seqlen_kv": 16},
        {"attn_mask_type": "arbitrary", "is_training": False},
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": (1, 4, 8, 8)},
        {"core_attention_bias_type": "alibi", "alibi_slopes_shape": (4,), "attn_mask_type": "causal"},
        {"num_gqa_groups": 2, "qkv_layout": "sbhd_sbhd_sbhd", "head_dim_v": 32, "window_size": (4, 0)},
        {"attention_dropout": 0.1, "softmax_type": "learnable", "return_max_logit": True, "softcap": 2.0},
        {"deterministic": True, "qkv_dtype": torch.bfloat16, "checkpoint_core_attention": True},
        {"fp8": True, "fp8_meta": {"recipe": DelayedScaling()}, "nominal_dtype": torch.bfloat16, "cuda_graph": True},
    ],
)
def test_calls_that_something_serves(changes):
    flash, _, fused, _, unfused, available = get_attention_backend(asked(**changes))
    assert [flash, fused, unfused].count(True) == 1 and available[2] and available[1] >= fused


@pytest.mark.parametrize(
    "changes",
    [
        {"context_parallel": True},
        {"cp_size": 2},
        {"inference_params": object()},
        {"num_splits": 2},
        {"fp8_output": True},
        {"has_score_mod": True},
        {"has_score_mod_bprop": True},
        {"qkv_type": type(None)},
        {"fp8": True, "fp8_meta": {"recipe": DelayedScaling(fp8_dpa=True)}},
        {"qkv_layout": "paged_kv_bshd_bshd_bshd"},
        {"qkv_layout": "bhsd_bhsd_bhsd"},
        {"qkv_layout": "thd_thd_thd", "attn_mask_type": "causal"},
    ],
)
def test_calls_that_nothing_serves_yet(changes):
    assert get_attention_backend(asked(**changes)) == NOTHING


def test_a_policy_decides():
    with te_dispatch.using(attention="torch.unfused_attention"):
        assert get_attention_backend(asked())[4:] == (True, [False, False, True])


def test_a_call_that_must_be_deterministic_is_asked_about_as_such(monkeypatch):
    calls = []

    def noted(*args, **kwargs):
        calls.append(attention_backends.planned(*args, **kwargs))
        return calls[-1]

    monkeypatch.setattr(attention_backends, "planned", attention_backends.plan, raising=False)
    monkeypatch.setattr(attention_backends, "plan", noted)
    for wanted in (True, False):
        get_attention_backend(asked(deterministic=wanted))
        assert {call.facts["deterministic"] for call in calls.pop()} == {wanted}


def test_values_that_the_module_refuses_are_errors():
    with pytest.raises(ValueError, match="made_up"):
        get_attention_backend(asked(attn_mask_type="made_up"))
    with pytest.raises(NotImplementedError, match="inference_params"):
        get_qkv_format("bshd_bshd_bshd", object())


def test_a_compiled_region_is_refused():
    with pytest.raises(Exception, match=r"get_attention_backend cannot be called in a compiled region"):
        torch.compile(lambda: get_attention_backend(SMALL), fullgraph=True, backend="eager")()


def test_fields_and_defaults():
    fields = {one.name: one.default for one in dataclasses.fields(AttentionParams)}
    assert len(fields) == 41 and fields["qkv_layout"] == "sbh3d" and fields["max_seqlen_q"] == 128
    assert AttentionParams() == AttentionParams() != AttentionParams(num_heads=8)
    assert list(inspect.signature(get_attention_backend).parameters) == ["attention_params"]


def test_windows():
    assert check_set_window_size("causal") == (-1, 0) and check_set_window_size("no_mask") == (-1, -1)
    assert check_set_window_size("causal", (4, 4)) == (4, 0) and check_set_window_size("padding", (4, 2)) == (4, 2)
    with pytest.warns(UserWarning, match="no window"):
        assert check_set_window_size("arbitrary", (-1, 0)) == (-1, -1)


def test_packages(monkeypatch):
    import importlib.metadata as metadata

    from packaging.version import Version

    installed = {"flash-attn": "2.6.3", "flash-attn-3": "3.0.0b1"}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    utils = FlashAttentionUtils
    assert utils.is_installed and utils.v3_is_installed and not utils.v4_is_installed
    assert utils.version == Version("2.6.3") and utils.fa4_version == Version("0")
    assert utils.v2_3_plus and utils.v2_6_0_plus and not utils.v2_7_0_plus
    installed.clear()
    assert not utils.is_installed and not utils.v2_plus and utils.version == Version("0")
    with pytest.raises(AttributeError, match="use_v3"):
        _ = utils.use_v3


def test_numbers_of_kernels():
    assert FusedAttnBackend.cast(2) is FusedAttnBackend.FP8 and FusedAttnBackend["No_Backend"] == -1
