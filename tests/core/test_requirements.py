# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every condition: when it holds, when it cannot be told, and the phrase it gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_dispatch.core.facts import UNKNOWN, Arch, Derived, DeviceFacts, Recording, arch_number
from te_dispatch.core.requirements import (
    All,
    AnyOf,
    Compare,
    Condition,
    MultipleOf,
    NoneOf,
    OneOf,
    OnVendor,
    atoms,
    condition_from_policy,
    version_tuple,
)  # fmt: skip

H200 = DeviceFacts("cuda", "nvidia", "sm_90", table=Arch(("e4m3fn", "e5m2"), True), extra={"version.cudnn": "9.10.2"})
MI300 = DeviceFacts("cuda", "amd", "gfx942", table=Arch(("e4m3fnuz", "e5m2fnuz"), True, warp_size=64))
BARE = DeviceFacts("acme", "ACME", "x1")


def verdict(condition: Condition, call: dict[str, Any] | None = None, device: DeviceFacts = H200) -> tuple[Any, str]:
    found = condition.check(call or {}, device)
    assert bool(found.reason) == (found.holds is not True), "a reason where it does not hold, and only there"
    return found.holds, found.reason


@pytest.mark.parametrize(
    ("condition", "call", "holds", "reason"),
    [
        (OneOf("mode", "a", "b"), {"mode": "b"}, True, ""),
        (OneOf("mode", "a", "b"), {"mode": "c"}, False, "mode is c, needs a or b"),
        (OneOf("mode", None), {"mode": None}, True, ""),
        (OneOf("mode", None), {"mode": "c"}, False, "mode is c, needs not given"),
        (OneOf("mode", "a"), {"mode": None}, False, "mode is not given, needs a"),
        (OneOf("mode", "a"), {}, None, "mode is unknown"),
        (OneOf("mode", "a"), {"mode": UNKNOWN}, None, "mode is unknown"),
        (OneOf("flag", True), {"flag": True}, True, ""),
        (OneOf("flag", True), {"flag": 1}, False, "flag is 1, needs True"),
        (OneOf("flag", 1), {"flag": True}, False, "flag is True, needs 1"),
        (OneOf("flag", False), {"flag": 0}, False, "flag is 0, needs False"),
        (OneOf("flag", False), {"flag": None}, False, "flag is not given, needs False"),
        (OneOf("n", 1.0), {"n": 1}, False, "n is 1, needs 1.0"),
        (NoneOf("mode", "a", None), {"mode": "b"}, True, ""),
        (NoneOf("mode", "a", None), {"mode": None}, False, "mode is not given, which is not served"),
        (NoneOf("flag", True), {"flag": 1}, True, ""),
        (NoneOf("mode", "a"), {}, None, "mode is unknown"),
        (Compare("k", ">=", 512), {"k": 512}, True, ""),
        (Compare("k", ">", 512), {"k": 512}, False, "k is 512, needs > 512"),
        (Compare("k", "<=", 512), {"k": 513}, False, "k is 513, needs <= 512"),
        (Compare("k", "<", 512), {"k": 511}, True, ""),
        (Compare("k", ">=", 1), {"k": True}, False, "k is True, needs >= 1"),
        (Compare("k", ">=", 1), {"k": None}, False, "k is not given, needs >= 1"),
        (Compare("k", ">=", 1), {"k": "2"}, False, "k is 2, needs >= 1"),
        (Compare("k", ">=", 1), {}, None, "k is unknown"),
        (MultipleOf("k", 16), {"k": 4096}, True, ""),
        (MultipleOf("k", 16), {"k": 0}, True, ""),
        (MultipleOf("k", 16), {"k": 4097}, False, "k is 4097, needs a multiple of 16"),
        (MultipleOf("k", 16), {"k": False}, False, "k is False, needs a multiple of 16"),
        (MultipleOf("k", 16), {"k": "16"}, False, "k is 16, needs a multiple of 16"),
        (MultipleOf("k", 16), {}, None, "k is unknown"),
        (OneOf("device.encodings", "e5m2"), {}, True, ""),
        (NoneOf("device.arch", "sm_90", "x"), {}, False, "device.arch is sm_90, which is not served"),
        (NoneOf("device.encodings", "e4m3fnuz"), {}, True, ""),
        (OneOf("device.fp8_matmul", True), {}, True, ""),
        (OneOf("device.nonsense", True), {}, None, "device.nonsense is unknown"),
        (Compare("device.version.cudnn", ">=", "9.9"), {}, True, ""),
        (Compare("device.version.cudnn", ">=", "9.10.2"), {}, True, ""),
        (Compare("device.version.cudnn", "<", "9.10.10"), {}, True, ""),
        (Compare("device.version.cudnn", ">=", "9.11"), {}, False, "device.version.cudnn is 9.10.2, needs >= 9.11"),
        (Compare("device.version.hip", ">=", "6"), {}, None, "device.version.hip is unknown"),
        (Compare("device.arch", ">=", "sm_80"), {}, True, ""),
        (Compare("device.arch", "<", "sm_100"), {}, True, ""),
        (Compare("device.arch", ">=", "sm_90a"), {}, True, ""),
        (Compare("device.arch", ">=", "gfx942"), {}, False, "device.arch is sm_90, needs >= gfx942"),
    ],
)  # fmt: skip
def test_single_conditions(condition: Condition, call: dict[str, Any], holds: bool | None, reason: str) -> None:
    assert verdict(condition, call) == (holds, reason)
    assert condition.describe() and condition.reads() == {condition.fact}  # type: ignore[union-attr]


def test_an_unlisted_arch_leaves_its_table_unknown() -> None:
    assert verdict(OneOf("device.encodings", "e4m3fn"), device=BARE)[0] is None
    assert verdict(OneOf("device.arch", "x1"), device=BARE)[0] is True


@pytest.mark.parametrize(
    ("lower", "higher"),
    [("sm_80", "sm_90"), ("sm_90", "sm_100"), ("sm_89", "sm_90a"), ("gfx90a", "gfx942"), ("gfx942", "gfx950"),
     ("gfx950", "gfx1100"), ("gfx908", "gfx90a"), ("x1", "x2"), ("X9", "x10"), ("npu910b", "npu920")],
)  # fmt: skip
def test_archs_of_one_family_are_ordered(lower: str, higher: str) -> None:
    device = DeviceFacts("cuda", "any", higher)
    assert Compare("device.arch", ">", lower).check({}, device).holds is True
    assert Compare("device.arch", "<=", lower).check({}, device).holds is False
    assert Compare("device.arch", "<", higher).check({}, DeviceFacts("cuda", "any", lower)).holds is True


@pytest.mark.parametrize("arch", ["cpu", "", "gfx", "gfx9", "gfxzzz", "apple"])
def test_an_arch_without_a_number_compares_with_nothing(arch: str) -> None:
    assert arch_number(arch) is None
    assert Compare("device.arch", ">=", "sm_80").check({}, DeviceFacts("x", "x", arch)).holds is False


def test_versions_compare_by_number_and_length_does_not_count() -> None:
    assert version_tuple("9.10.2") > version_tuple("9.9.9")
    assert version_tuple("9.10") == version_tuple("9.10.0") == version_tuple("9.10.0.0")
    assert version_tuple("3.6rc1") == (3, 6) and version_tuple("2.11.0+cu130") == (2, 11)
    assert version_tuple("unknown") == ()
    device = DeviceFacts("cuda", "nvidia", "sm_90", extra={"version.lib": "9.10"})
    assert Compare("device.version.lib", ">=", "9.10.0").check({}, device).holds is True
    assert Compare("device.version.lib", ">", "9.10.0").check({}, device).holds is False


def test_all() -> None:
    both = All(OneOf("a", 1), OneOf("b", 2))
    assert verdict(both, {"a": 1, "b": 2})[0] is True
    assert verdict(both, {"a": 1, "b": 3}) == (False, "b is 3, needs 2")
    assert verdict(both, {"b": 3}) == (False, "b is 3, needs 2"), "a part that fails decides, known or not"
    assert verdict(both, {"b": 2}) == (None, "a is unknown")
    assert verdict(All())[0] is True
    assert both.reads() == {"a", "b"} and both.describe() == "a is 1 and b is 2"


def test_any_of() -> None:
    either = AnyOf(OneOf("a", 1), OneOf("b", 2))
    assert verdict(either, {"b": 2})[0] is True, "one that holds decides, whatever is unknown"
    assert verdict(either, {"a": 0, "b": 0}) == (False, "a is 0, needs 1; or b is 0, needs 2")
    assert verdict(either, {"a": 0})[0] is None
    assert either.reads() == {"a", "b"}


def test_on_vendor_speaks_of_that_vendor_only() -> None:
    condition = OnVendor("NVIDIA", Compare("device.arch", ">=", "sm_100"))
    assert verdict(condition, device=MI300)[0] is True
    assert verdict(condition) == (False, "device.arch is sm_90, needs >= sm_100")
    assert condition.reads() == {"device.arch", "device.vendor"}
    assert [a.fact for a in atoms(All(AnyOf(condition, OneOf("a", 1))))] == ["device.vendor", "device.arch", "a"]


def test_vendors_are_compared_in_lower_case() -> None:
    for word in ("acme", "Acme", "ACME"):
        assert verdict(OneOf("device.vendor", word), device=BARE)[0] is True
        assert verdict(NoneOf("device.vendor", word), device=BARE)[0] is False
        assert verdict(OnVendor(word, OneOf("a", 1)), {"a": 2}, BARE)[0] is False


@pytest.mark.parametrize(
    "make",
    [AnyOf, lambda: OneOf("a"), lambda: NoneOf("a"), lambda: Compare("a", "==", 1), lambda: Compare("a", "~", 1)],
)
def test_a_condition_that_says_nothing_is_refused_where_it_is_written(make: Any) -> None:
    with pytest.raises(ValueError):
        make()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("sm_90", OneOf("f", "sm_90")),
        (["a", "b"], OneOf("f", "a", "b")),
        (True, OneOf("f", True)),
        (None, OneOf("f", None)),
        (">= 512", Compare("f", ">=", 512)),
        (" <1.5", Compare("f", "<", 1.5)),
        (">= sm_90", Compare("f", ">=", "sm_90")),
        ("% 16 == 0", MultipleOf("f", 16)),
    ],
)
def test_conditions_of_a_policy(value: Any, expected: Condition) -> None:
    assert condition_from_policy("f", value) == expected


@pytest.mark.parametrize("value", [[], ">=", "== 3", "!= 3", "% 16", "% 16 == 1", "> 1 2"])
def test_a_condition_that_cannot_be_read_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="f"):
        condition_from_policy("f", value)


@given(st.integers(-5, 5000), st.sampled_from((">=", ">", "<=", "<")), st.integers(0, 600))
def test_expressions_of_sizes_say_what_check_says(value: int, operator: str, bound: int) -> None:
    for condition in (Compare("k", operator, bound), MultipleOf("k", bound or 1)):
        assert eval(condition.expression("k"), {"k": value}) == condition.check({"k": value}, H200).holds


def test_what_is_known_can_be_asked_with_in() -> None:
    base = {"a": 1, "b": UNKNOWN}
    recording = Recording(base)
    assert "a" in recording and "b" not in recording and "c" not in recording
    assert recording.reads[""] == {("a", None), ("b", None), ("c", None)}, "what `in` asks is read like any other"
    derived = Derived(recording, {"x": 1, "y": lambda call: call.get("c", UNKNOWN)})
    assert "x" in derived and "y" not in derived and "a" not in derived
    assert "a" in Derived(recording, {}, inherit=True)
