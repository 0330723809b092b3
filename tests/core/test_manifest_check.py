# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Mistakes in manifests: types of fields, arguments of conditions, and words that nobody else uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import te_dispatch.ops.declared  # noqa: F401  # fills OPERATORS
from te_dispatch.core.discovery import register
from te_dispatch.core.facts import Arch
from te_dispatch.core.manifest import Implementation, Manifest
from te_dispatch.core.manifest_check import operator_problems
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.policy import Policy
from te_dispatch.core.requirements import All, AnyOf, Compare, MultipleOf, NoneOf, OneOf, OnVendor
from te_dispatch.core.resolve import resolve
from te_dispatch.core.snapshot import InstalledBackend, Snapshot
from tests.core.toy import CPU, backend, extension, kernel

INFINITE, NAN = float("inf"), float("nan")


def gemm(*requires: Any, **fields: Any) -> Implementation:
    return kernel("gemm", "k", requires=requires, **fields)


def registered(manifest: Manifest) -> Snapshot:
    return register([extension(manifest, name=manifest.name)], OPERATORS)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"devices": [1]}, "devices is the list [1], not a dict"),
        ({"devices": {"cpu": 1}}, "devices['cpu'] must read 'module:function', got 1"),
        ({"devices": {"cpu": "module"}}, "devices['cpu'] must read 'module:function', got 'module'"),
        ({"archs": 5}, "archs is the int 5, not a dict"),
        ({"archs": {"cpu": 5}}, "archs['cpu'] is the int 5, not a dict"),
        ({"archs": {"cpu": {"cpu": 5}}}, "archs['cpu']['cpu'] is the int 5, not an Arch"),
        ({"vendors": (5,)}, "vendors holds 5"),
        ({"vendors": ("zeta:z2",)}, "vendors holds 'zeta:z2'"),
        ({"doctor": 5}, "doctor must read 'module:function', got 5"),
        ({"unavailable": "module"}, "unavailable must read"),
        ({"description": None}, "description must be a str"),
        ({"api_version": True}, "api_version is True"),
    ],
)
def test_a_field_of_another_type_is_refused(fields: dict[str, Any], reason: str) -> None:
    [failure] = registered(backend("zeta", gemm(), **fields)).failures
    assert reason in failure.reason


@pytest.mark.parametrize(
    ("fields", "api_version", "reason"),
    [
        ({"plan": "module"}, 2, "implementation 'k': plan must read 'module:function', got 'module'"),
        ({"operand_format": 5}, 2, "operand_format must read 'module:function', got 5"),
        ({"output_shape": ""}, 2, "output_shape must read 'module:function', got ''"),
        ({"plan": "module:plan"}, 1, "plan is part of api_version 2, the manifest says 1"),
        (
            {"op": "quantize@1", "operand_format": "module:format"}, 2,
            "operand_format is of gemm and grouped_gemm, not of quantize",
        ),
    ],
)  # fmt: skip
def test_functions_that_an_implementation_names_are_checked(
    fields: dict[str, Any], api_version: int, reason: str
) -> None:
    entry = dataclasses.replace(gemm(), **fields)
    [failure] = registered(backend("zeta", entry, api_version=api_version)).failures
    assert reason in failure.reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"encodings": ("e4m3",)}, "encodings: unknown word 'e4m3'; did you mean 'e4m3fn'?"),
        ({"encodings": ("fp8",)}, "it is called 'e4m3fn' here"),
        ({"encodings": "e4m3fn"}, "encodings is the str 'e4m3fn', not a tuple"),
        ({"encodings": (4,)}, "encodings holds 4, not a word"),
        ({"fp8_layouts": ("TT", "XX")}, "fp8_layouts: unknown word 'TT'"),
        ({"block_scaled_matmul": ("mxfp4x",)}, "block_scaled_matmul: unknown word 'mxfp4x'"),
        ({"fp8_matmul": "yes"}, "fp8_matmul must be True or False"),
        ({"warp_size": 0}, "warp_size must be a positive int"),
        ({"warp_size": 1.5}, "warp_size must be a positive int"),
    ],
)
def test_a_row_of_an_arch_table_is_checked(fields: dict[str, Any], reason: str) -> None:
    manifest = backend("zeta", gemm(), archs={"zeta": {"z2": Arch(**fields)}})
    [failure] = registered(manifest).failures
    assert failure.reason.startswith("archs['zeta']['z2']: ") and reason in failure.reason


def test_an_encoding_of_a_vendor_s_own_is_accepted() -> None:
    manifest = backend("zeta", gemm(OneOf("a.dtype", "zeta8")), archs={"zeta": {"z2": Arch(("zeta8",))}})
    snapshot = registered(manifest)
    assert not snapshot.failures and not snapshot.unusable


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Compare("k", ">=", None), "compares with an int, a float or a str, got None"),  # type: ignore[arg-type]
        (lambda: Compare("k", "<=", INFINITE), "compares with a finite number, got inf"),
        (lambda: Compare("k", "<=", NAN), "compares with a finite number, got nan"),
        (lambda: Compare("k", "<=", True), "got True"),
        (lambda: MultipleOf("k", 0), "divides by zero"),
        (lambda: MultipleOf("k", -16), "has a factor below 1"),
        (lambda: MultipleOf("k", 1.5), "positive int, got 1.5"),  # type: ignore[arg-type]
        (lambda: MultipleOf("k", "16"), "positive int, got '16'"),  # type: ignore[arg-type]
        (lambda: OneOf("k", object()), "compares with a str, bool, int, float or None"),  # type: ignore[arg-type]
        (lambda: OneOf(7, 8), "is the name of a fact, got 7"),  # type: ignore[arg-type]
    ],
)
def test_a_condition_that_cannot_be_checked_cannot_be_written(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert reason in str(caught.value)


@pytest.mark.parametrize("field", ["claims", "traits", "requires"])
def test_one_value_where_several_belong_is_refused(field: str) -> None:
    value: Any = Compare("k", ">=", 1) if field == "requires" else "deterministic"
    with pytest.raises(TypeError, match=f"implementation 'k': {field} holds several values, got .* alone; write"):
        Implementation("gemm@1", "k", "m:f", **{field: value})
    with pytest.raises(TypeError, match="manifest 'zeta': vendors holds several values, got 'zeta' alone"):
        Manifest("zeta", 1, (), vendors="zeta")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        (OneOf("device.vender", "zeta"), "there is no device fact 'vender'; did you mean 'vendor'?"),
        (OneOf("device.encoding", "e5m2"), "did you mean 'encodings'?"),
        (OneOf("device.vendor", "zetta"), "unknown word 'zetta'; did you mean 'zeta'?"),
        (OneOf("device.encodings", "e4m3"), "did you mean 'e4m3fn'?"),
        (OneOf("device.fp8_layouts", "TT"), "unknown word 'TT'"),
        (OneOf("device.fp8_matmul", 1), "device.fp8_matmul is True or False, got 1"),
        (Compare("device.vendor", ">=", "zeta"), "device.vendor does not compare"),
        (Compare("device.arch", ">=", 90), "90 has no number to compare archs by"),
        (Compare("device.version.torch", ">=", 2.9), "a version compares with a version, such as '9.10', got 2.9"),
        (Compare("device.version.torch", ">=", "v2"), "a version compares with a version"),
        (OneOf("a.dtype", "float32"), "unknown word 'float32'; it is called 'fp32' here"),
        (NoneOf("a.dtype", "bfloat16"), "it is called 'bf16' here"),
        (OneOf("a.dtype", "e5m3"), "did you mean 'e5m2'?"),
        (OneOf("a.scaling", "blocked"), "unknown word 'blocked'"),
        (OneOf("layout", "XX"), "unknown word 'XX'; known: NN, NT, TN"),
        (OneOf("epilogue", "gelo"), "did you mean 'gelu'?"),
        (OneOf("epilogue", "None"), "'None' is a word; write None, without quotes"),
        (OneOf("out_dtype", "None"), "'None' is a word; write None, without quotes"),
        (OneOf("bias", None), "bias is True or False, got None"),
        (OneOf("k", "16"), "k is a whole number, got '16'"),
        (Compare("k", ">=", "16"), "compares with a number, got '16'"),
        (Compare("a.dtype", ">=", 1), "a.dtype does not compare"),
        (OneOf("k", 16, -1), "k is a size, got -1"),
        (OneOf("lay_out", "NT"), "requires a fact that gemm does not have: lay_out; did you mean 'layout'?"),
        (AnyOf(OneOf("layout", "NT"), OnVendor("zeta", OneOf("layout", "TT"))), "unknown word 'TT'"),
    ],
)
def test_a_word_that_nobody_else_uses_costs_its_implementation_and_is_told(condition: Any, reason: str) -> None:
    manifest = backend("zeta", gemm(condition), kernel("gemm", "sound"), vendors=("zeta",))
    snapshot = registered(manifest)
    assert not snapshot.failures and set(snapshot.unusable) == {"zeta.k"}
    assert reason in snapshot.unusable["zeta.k"]


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        (
            (OneOf("layout", "NT"), OneOf("layout", "NN")),
            "'layout is NT' and 'layout is NN', which never hold together",
        ),
        ((OneOf("epilogue", "gelu"), OneOf("epilogue", None)), "'epilogue is gelu' and 'epilogue is not given'"),
        ((OneOf("accumulate", True), OneOf("accumulate", False)), "'accumulate is True' and 'accumulate is False'"),
        ((OneOf("a.dtype", "bf16", "fp16"), NoneOf("a.dtype", "fp16", "bf16")), "never hold together"),
        ((NoneOf("layout", "NT", "NN", "TN", None),), "which never holds"),
        ((NoneOf("bias", True, False),), "which never holds"),
        ((OneOf("k", 16, 32), MultipleOf("k", 64)), "'k is 16 or 32' and 'k % 64 == 0'"),
        ((Compare("k", "<", 0),), "requires 'k < 0', which never holds"),
        ((Compare("k", ">", 16), Compare("k", "<", 17)), "never hold together"),
        ((Compare("k", ">=", 1), MultipleOf("k", 12), MultipleOf("k", 8), Compare("k", "<=", 23.5)), "never hold"),
        ((Compare("k", "<=", 64), MultipleOf("k", 32), NoneOf("k", 0, 32, 64, 7)), "never hold"),
        ((Compare("device.arch", ">=", "sm_90"), Compare("device.arch", "<", "sm_90")), "never hold together"),
        ((Compare("device.arch", ">=", "sm_90"), Compare("device.arch", "<=", "gfx950")), "never hold together"),
        ((OneOf("device.arch", "sm_80"), Compare("device.arch", ">=", "sm_90")), "never hold together"),
        ((Compare("device.version.cuda", ">=", "12.9"), Compare("device.version.cuda", "<", "12.10")), None),
        ((Compare("device.version.cuda", ">", "12.9"), Compare("device.version.cuda", "<=", "12.9.0")), "never hold"),
        ((OneOf("device.encodings", "e5m2"), NoneOf("device.encodings", "e5m2")), "never hold together"),
        ((All(OneOf("layout", "NT"), OneOf("bias", True)), OneOf("bias", False)), "'bias is True' and 'bias is False'"),
        ((AnyOf(OneOf("layout", "NT"), OneOf("layout", "NN")), OneOf("layout", "TN")), "'layout is NN'"),
        ((OnVendor("zeta", OneOf("layout", "NT")), OneOf("device.vendor", "zeta"), OneOf("layout", "NN")), "never"),
        ((OneOf("device.encodings", "e5m2"), OneOf("device.encodings", "e4m3fn")), None),
        ((OneOf("device.tiles", 4), OneOf("device.tiles", 8)), None),
        ((Compare("k", ">", 16), Compare("k", "<=", 17)), None),
        ((Compare("k", "<=", 64), MultipleOf("k", 32), NoneOf("k", 0, 64)), None),
        ((MultipleOf("k", 16), Compare("k", "<", 16)), None),
        ((NoneOf("layout", "NT"), NoneOf("layout", "NN")), None),
        ((OnVendor("zeta", OneOf("layout", "NT")), OneOf("layout", "NN")), None),
        ((AnyOf(OneOf("layout", "NT"), OneOf("bias", True)), OneOf("bias", False)), None),
    ],
    ids=lambda value: " and ".join(one.describe() for one in value) if isinstance(value, tuple) else "",
)
def test_requirements_that_can_never_hold_together_cost_their_implementation(
    conditions: tuple[Any, ...], reason: str | None
) -> None:
    """Doctor said that nothing was broken, and the kit that nothing was claimed."""
    manifest = backend("zeta", gemm(*conditions), kernel("gemm", "sound"), vendors=("zeta",))
    unusable = registered(manifest).unusable
    assert set(unusable) == ({"zeta.k"} if reason else set())
    assert reason is None or reason in unusable["zeta.k"]


def test_many_alternatives_do_not_delay_the_start() -> None:
    """Each of 2**40 combinations is contradictory; a few are tried."""
    pairs = [AnyOf(OneOf(f"device.t{i}", 1), OneOf(f"device.t{i}", 2)) for i in range(40)]
    last = AnyOf(*(All(OneOf("layout", "NT"), OneOf("layout", other)) for other in ("NN", "TN")))
    assert registered(backend("zeta", gemm(*pairs, last))).unusable == {}


@pytest.mark.parametrize(
    ("op", "condition", "reason"),
    [
        ("quantize", OneOf("quantizer", "delayd"), "unknown word 'delayd'; did you mean 'delayed'?"),
        ("multi_tensor_quantize", OneOf("quantizers", "curent"), "did you mean 'current'?"),
        ("quantize", OneOf("usage", "rows"), "did you mean 'row'?"),
        ("dequantize", OneOf("x.usage", "both"), "unknown word 'both'; known: column, row"),
        ("relayout_scales", OneOf("scale_layout", "swizzled"), "unknown word 'swizzled'"),
        ("convert_encoding", OneOf("overflow", "raise"), "unknown word 'raise'; known: error, saturate"),
        ("update_delayed_scales", OneOf("algorithm", "most-recent"), "did you mean 'most_recent'?"),
        ("rope_fwd", OneOf("layout", "shbd"), "did you mean 'sbhd'?"),
        ("grouped_gemm", OneOf("splits", "cpu"), "unknown word 'cpu'; known: device, host, none"),
        ("grouped_gemm", OneOf("a.scaling", "blocked"), "unknown word 'blocked'"),
        ("softmax_fwd", OneOf("causal", "no"), "causal is True or False, got 'no'"),
        ("attention_fwd", OneOf("dropout", "off"), "dropout is True or False, got 'off'"),
        ("dropout_add_fwd", NoneOf("dropout", 0.0), "dropout is True or False, got 0.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.describe(),
)
def test_every_operator_s_words_are_known(op: str, condition: Any, reason: str) -> None:
    implementation = Implementation(f"{op}@1", "k", "m:f", (condition,))
    assert reason in operator_problems(Manifest("zeta", 1, (implementation,)), OPERATORS)["zeta.k"]


@pytest.mark.parametrize(
    "condition",
    [
        OneOf("device.vendor", "amd", "zeta", "qualcomm"),
        OneOf("device.tile_count", 4),
        Compare("device.tile_count", ">=", 4),
        OneOf("device.zeta.ready", True),
        Compare("device.version.zeta", ">=", "1.0rc1"),
        Compare("device.arch", ">=", "z2"),
        Compare("device.memory", ">=", 2**30),
        MultipleOf("device.warp_size", 32),
        OneOf("quantizer", None) if "quantizer" in OPERATORS["gemm"].facts else OneOf("out_quantizer", None),
        OneOf("epilogue", None, "gelu"),
        OneOf("out_dtype", None, "bf16"),
        Compare("k", ">", 0.5),
    ],
    ids=lambda condition: condition.describe(),
)
def test_what_a_vendor_may_ask_for_is_accepted(condition: Any) -> None:
    assert registered(backend("zeta", gemm(condition), vendors=("zeta",))).unusable == {}


class _Raises(OneOf):
    def check(self, call: Any, device: Any) -> Any:
        raise ZeroDivisionError("of my own")


def test_a_condition_of_a_class_of_one_s_own_is_refused() -> None:
    [failure] = registered(backend("zeta", gemm(AnyOf(_Raises("k", 1))))).failures
    assert "which is no condition of te_dispatch.core.requirements" in failure.reason


def test_a_condition_that_raises_costs_its_implementation_and_is_named() -> None:
    manifests = (backend("zeta", gemm(_Raises("k", 1))), backend("torch", kernel("gemm", "matmul")))
    snapshot = Snapshot({m.name: InstalledBackend(m, m.name, "1") for m in manifests})
    decision = resolve(OPERATORS["gemm"], {}, CPU, Policy(), snapshot)
    assert [accepted.id for accepted in decision.accepted] == ["torch.matmul"]
    [rejected] = [r for r in decision.rejected if r.id == "zeta.k"]
    assert rejected.reason == "its requirements cannot be checked: ZeroDivisionError: of my own"
