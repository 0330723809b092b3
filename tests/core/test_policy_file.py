# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a policy file that is right becomes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.policy import Numerics, Origin, Policy, merge
from te_dispatch.core.policy.file import effective_with_origins, load_policy
from te_dispatch.core.policy.known import Known
from te_dispatch.core.requirements import Compare, MultipleOf, OneOf
from te_dispatch.core.shipped import shipped_policies

Write = Callable[..., Path]

FULL = """\
version: 1
description: All keys.
optional_backends: [initech]
prefer: [native, torch.matmul, cuda.anything, initech.thing]
allow: [native, torch, triton, cuda, initech]
deny: ["trait:emulated"]
require: [native, torch]
numerics:
  deterministic: true
rules:
  - op: gemm@2
    when: {vendor: NVIDIA, arch: sm_90, k: "% 16 == 0"}
    prefer: [torch]
  - op: "attention_*"
    when:
      version.cudnn: ">= 9.10"
      q.dtype: [bf16, fp16]
      device.arch: ">= sm_80"
    deny: [triton.flash_fwd]
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str, name: str = "p.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text, encoding="utf-8")
        return path

    return written


def test_every_key(known: Known, write: Write) -> None:
    path = write(FULL)
    policy = load_policy(path, known)
    assert [s.text for s in policy.prefer] == ["native", "torch.matmul", "cuda.anything", "initech.thing"]
    assert policy.prefer[1].origin == Origin(str(path), 4, 18)
    assert policy.allow is not None and policy.allow[-1].origin == Origin(str(path), 5, 38)
    assert [[s.text for s in group] for group in policy.require] == [["native", "torch"]]
    assert policy.numerics == Numerics(None, True)
    assert policy.numerics.origins == {"deterministic": Origin(str(path), 9, 18)}
    gemm, attention = policy.rules
    assert gemm.op == "gemm"
    assert gemm.when == (OneOf("device.vendor", "nvidia"), OneOf("device.arch", "sm_90"), MultipleOf("k", 16))
    assert gemm.origin == Origin(str(path), 11, 5)
    assert attention.when == (
        Compare("device.version.cudnn", ">=", "9.10"),
        OneOf("q.dtype", "bf16", "fp16"),
        Compare("device.arch", ">=", "sm_80"),
    )


def test_versions_compare_as_versions(known: Known, write: Write) -> None:
    text = "version: 1\nrules:\n- {op: gemm, when: {version.cudnn: '>= 9.10'}, prefer: [torch]}\n"
    (condition,) = load_policy(write(text), known).rules[0].when

    def holds(version: str) -> bool | None:
        return condition.check({}, DeviceFacts("cuda", "nvidia", "sm_90", extra={"version.cudnn": version})).holds

    assert [holds(v) for v in ("9.9.9", "9.10.0", "9.11", "10.0")] == [False, True, True, True]


@pytest.mark.parametrize(
    ("written", "holding", "others"),
    [
        ("9.10", ("9.10", "9.10.0", "9.10.2", "9.10rc1"), ("9.1", "9.9", "9.11", "10.0")),
        ("2.13.0", ("2.13", "2.13.0+cpu"), ("2.13.1", "2.12.9")),
        ("12", ("12.0", "12.6"), ("11.9", "13.0")),
    ],
)
def test_a_version_means_what_was_released_of_it(
    known: Known, write: Write, written: str, holding: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """Also where YAML takes it for a number: 9.10 is not 9.1."""
    text = f"version: 1\nrules:\n- {{op: gemm, when: {{version.cudnn: {written}}}, prefer: [torch]}}\n"
    conditions = load_policy(write(text), known).rules[0].when

    def holds(version: str) -> bool:
        device = DeviceFacts("cuda", "nvidia", "sm_90", extra={"version.cudnn": version})
        return all(condition.check({}, device).holds for condition in conditions)

    assert all(map(holds, holding)) and not any(map(holds, others))


def test_call_fact_wins_over_device_fact_of_the_same_name(known: Known, write: Write) -> None:
    text = "version: 1\nrules:\n- {op: gemm, when: {name: a, device.name: b}, prefer: [torch]}\n"
    assert load_policy(write(text), known).rules[0].when == (OneOf("name", "a"), OneOf("device.name", "b"))
    text = "version: 1\nrules:\n- {op: attention, when: {name: a}, prefer: [torch]}\n"
    assert load_policy(write(text), known).rules[0].when == (OneOf("device.name", "a"),)


def test_words_a_plugin_brings(known: Known, write: Write) -> None:
    """Vendor, arch, encoding and device fact of a plugin need no change of the core."""
    when = "{vendor: acme, arch: x2, a.dtype: acme8, tile_count: 8}"
    text = f"version: 1\nrules:\n- {{op: gemm, when: {when}, deny: [torch]}}\n"
    assert OneOf("device.tile_count", 8) in load_policy(write(text), known).rules[0].when


def test_absent_backends_and_their_chips_are_fine(known: Known, write: Write) -> None:
    """One file serves every node of a mixed cluster: rocm is not installed, and no manifest has a table of AMD's."""
    text = """\
version: 1
optional_backends: [initech]
prefer: [rocm.hipblaslt_gemm, initech]
rules:
- {op: gemm, when: {vendor: amd, arch: gfx942}, prefer: [rocm]}
- {op: gemm, when: {vendor: ini, arch: i9}, prefer: [initech.i]}
"""
    assert len(load_policy(write(text), known).rules) == 2


def test_allow_of_nothing_differs_from_no_allow(known: Known, write: Write) -> None:
    assert load_policy(write("version: 1\nallow: []\n"), known).allow == ()
    assert load_policy(write("version: 1\n"), known).allow is None


def test_includes_are_weaker_and_the_first_is_the_stronger(known: Known, write: Write) -> None:
    write("version: 1\nprefer: [triton, torch]\nallow: [torch]\nnumerics: {fp8_portability: common}\n", "sub/b.yaml")
    write(
        "version: 1\nprefer: [reference]\nallow: []\nnumerics: {fp8_portability: native}\ninclude: [sub/b.yaml]\n",
        "c.yaml",
    )
    path = write("version: 1\ndescription: own\nprefer: [torch]\ninclude: [sub/b.yaml, c.yaml]\n")
    policy = load_policy(path, known)
    assert [s.text for s in policy.prefer] == ["torch", "triton", "reference"]
    assert policy.prefer[0].origin.source == str(path)
    assert policy.allow is not None and [s.text for s in policy.allow] == ["torch"]
    assert policy.numerics.fp8_portability == "common"
    assert policy.numerics.origins["fp8_portability"].source.endswith("b.yaml")
    assert (policy.name, policy.description) == ("p.yaml", "own")


def test_include_leaves_open_what_no_file_says(known: Known, write: Write) -> None:
    """Otherwise a stronger layer would silently take back what a weaker one promises."""
    write("version: 1\nprefer: [torch]\n", "b.yaml")
    policy = load_policy(write("version: 1\ninclude: [b.yaml]\n"), known)
    assert policy.numerics == Numerics(None, None)
    assert merge([policy, Policy(numerics=Numerics("common", True))]).numerics == Numerics("common", True)


def test_include_of_a_shipped_policy(known: Known, write: Write) -> None:
    policy = load_policy(write("version: 1\ninclude: [portable]\n"), known)
    assert policy.numerics.fp8_portability == "common"


def test_optional_backends_of_an_included_file_count(known: Known, write: Write) -> None:
    write("version: 1\noptional_backends: [initech]\n", "b.yaml")
    policy = load_policy(write("version: 1\ninclude: [b.yaml]\nprefer: [initech]\n"), known)
    assert policy.optional_backends == ("initech",)


def test_a_file_included_twice_counts_once(known: Known, write: Write) -> None:
    write("version: 1\noptional_backends: [initech]\nrequire: [torch, initech]\n", "d.yaml")
    write("version: 1\ninclude: [d.yaml]\nprefer: [initech]\n", "b.yaml")
    write("version: 1\ninclude: [d.yaml]\ndeny: [initech.slow]\n", "c.yaml")
    policy = load_policy(write("version: 1\ninclude: [b.yaml, c.yaml]\n"), known)
    assert len(policy.require) == 1
    assert [s.text for s in policy.prefer + policy.deny] == ["initech", "initech.slow"]


def test_byte_order_mark_and_crlf(known: Known, write: Write) -> None:
    policy = load_policy(write("\ufeffversion: 1\r\nprefer: [torch]\r\n"), known)
    assert policy.prefer[0].origin.line == 2


def test_a_shipped_name_is_not_shadowed_by_a_file(
    known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verify").write_text("version: 1\n")
    monkeypatch.chdir(tmp_path)
    assert load_policy("verify", known).allow is not None
    assert load_policy("./verify", known).allow is None


def test_shipped_policies(known: Known) -> None:
    assert set(shipped_policies()) == {"default", "deterministic", "portable", "triton-only", "verify"}
    default = load_policy("default", known)
    for name in shipped_policies():
        policy = load_policy(name, known)
        assert policy.name == name and policy.description
        # Nothing that a shipped policy allows may be denied by the layer beneath it.
        assert not {s.text for s in policy.allow or ()} & {s.text for s in merge([policy, default]).deny}
    assert merge([load_policy("portable", known), default]).numerics == Numerics("common", False)
    assert merge([load_policy("deterministic", known), default]).numerics == Numerics("native", True)


def test_effective_with_origins(known: Known, write: Write) -> None:
    path = write(FULL)
    found = {where: (value, str(origin)) for where, value, origin in effective_with_origins(load_policy(path, known))}
    assert found["prefer[0]"] == ("native", f"{path}:4:10")
    assert found["require[0][1]"] == ("torch", f"{path}:7:19")
    assert found["numerics.deterministic"] == (True, f"{path}:9:18")
    assert found["rules[0].op"] == ("gemm", f"{path}:11:5")
    assert found["rules[1].deny[0]"] == ("triton.flash_fwd", f"{path}:19:12")
    assert "numerics.fp8_portability" not in found
    empty = load_policy(write("version: 1\nallow: []\n"), known)
    assert ("allow", [], Origin(str(path), 1, 1)) in effective_with_origins(empty)


def test_origins_survive_a_merge(known: Known, write: Write) -> None:
    strong = load_policy(write("version: 1\nnumerics: {deterministic: false}\n", "s.yaml"), known)
    weak = load_policy("deterministic", known)
    found = {where: origin for where, _, origin in effective_with_origins(merge([strong, weak]))}
    assert found["numerics.deterministic"].source.endswith("s.yaml")
    assert found["numerics.fp8_portability"] == Origin()


def test_the_example_in_the_documentation(known: Known, write: Write) -> None:
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    example = text.partition("```yaml\n")[2].partition("```")[0]
    policy = load_policy(write(example), known)
    assert policy.numerics.fp8_portability == "common" and len(policy.rules) == 1
