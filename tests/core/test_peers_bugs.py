# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Bugs that were found in other dispatch systems, each shown to be absent here."""

from __future__ import annotations

import logging
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from te_dispatch.core.devices import describe_device
from te_dispatch.core.discovery import discover, register
from te_dispatch.core.errors import Declined, NoImplementation, PolicyError
from te_dispatch.core.facts import Arch, DeviceFacts
from te_dispatch.core.manager import OpManager
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.policy import Policy
from te_dispatch.core.requirements import Compare, OneOf
from te_dispatch.core.resolve import resolve
from te_dispatch.core.snapshot import Snapshot
from tests.core.toy import (
    CPU,
    TOYS,
    answering,
    answers,
    backend,
    extension,
    installed,
    kernel,
    manager,
    preferring,
    rule,
    selectors,
    target,
)  # fmt: skip

T = torch.zeros(4, 16)


pytestmark = pytest.mark.usefixtures("toy_operators")


def order(snapshot: Snapshot, policy: Policy, call: dict[str, Any] | None = None, op: str = "mix") -> list[str]:
    return [a.id for a in resolve(TOYS[op], call or {}, CPU, policy, snapshot).accepted]


# -- TransformerEngine-FL's plugin core -------------------------------------------------------------------------------


def test_strict_inverted() -> None:
    """STRICT=1 fell back and 0 raised. Here a requirement raises, a preference falls back."""
    picky = kernel("mix", "k", answering("mix", "a"), requires=(OneOf("mode", "odd"),))
    m = manager(backend("a", picky), *answers("mix", ["b"]))
    with m.using(mix="a"), pytest.raises(NoImplementation):
        m.ops.mix(T, T)
    with m.using(prefer={"mix": "a"}):
        assert m.ops.mix(T, T) == "b"


@pytest.mark.parametrize("written", ["NVIDIA", "Nvidia", "nvidia"])
def test_vendor_names_compared_case_sensitively(written: str, tmp_path: Path) -> None:
    snapshot = installed(
        backend("a", kernel("mix", "k")),
        backend(
            "v",
            kernel("mix", "k", requires=(OneOf("device.vendor", written),)),
            vendors=(written,),
            archs={written: {"sm_90": Arch()}},
        ),
    )
    device = describe_device(snapshot, f"{written}:SM_90")
    assert resolve(TOYS["mix"], {}, device, preferring("native"), snapshot).accepted[0].id == "v.k"
    probed = DeviceFacts("cuda", written, "sm_90")
    file = tmp_path / "p.yaml"
    file.write_text(f"version: 1\nrules:\n  - op: mix\n    when: {{vendor: {written}}}\n    prefer: [v]\n")
    m = OpManager(snapshot, environ={"TE_DISPATCH_POLICY": str(file)})
    assert resolve(TOYS["mix"], {}, probed, m.capture().policy, snapshot).accepted[0].id == "v.k"


@pytest.mark.parametrize("traits", [(), ("emulated",), ("plain_torch",), ("flash",)])
def test_allow_list_ignored_for_one_kind(traits: tuple[str, ...]) -> None:
    snapshot = installed(
        backend("a", kernel("mix", "k", traits=traits)),
        backend("b", kernel("mix", "k", traits=traits), vendors=("cpu",)),
    )
    assert order(snapshot, Policy(allow=selectors("a"))) == ["a.k"]
    assert order(snapshot, Policy(allow=selectors("b"))) == ["b.k"]


def test_empty_allow_list_meant_all() -> None:
    m = manager(*answers("mix", ["a"]))
    with m.policy(Policy(name="none", allow=())), pytest.raises(NoImplementation, match="nothing"):
        m.ops.mix(T, T)


def test_priority_never_crossed_kinds() -> None:
    """A portable implementation of a better rank comes before a vendor's, where no policy says otherwise."""
    snapshot = installed(
        backend("torch", kernel("mix", "k", rank=1)), backend("vendor", kernel("mix", "k", rank=2), vendors=("cpu",))
    )
    assert order(snapshot, Policy()) == ["torch.k", "vendor.k"]
    assert order(snapshot, preferring("native")) == ["vendor.k", "torch.k"]


def test_ties_broken_reverse_alphabetically() -> None:
    assert order(installed(*(backend(n, kernel("mix", "k")) for n in "bca")), Policy()) == ["a.k", "b.k", "c.k"]


def test_min_arch_and_supported_dtypes_never_read() -> None:
    requires = (Compare("device.arch", ">=", "sm_90"), OneOf("a.dtype", "bf16"))
    snapshot = installed(backend("a", kernel("mix", "k", requires=requires)))
    for arch, dtype, step in (("sm_80", "bf16", "device"), ("sm_90", "fp32", "call")):
        device = DeviceFacts("cuda", "nvidia", arch)
        (rejected,) = resolve(TOYS["mix"], {"a.dtype": dtype}, device, Policy(), snapshot).rejected
        assert rejected.where == step and "needs" in rejected.reason


def test_fallback_after_a_partial_in_place_write_ran_an_accumulation_twice_and_dropped_the_first_error() -> None:
    def run(a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        out.add_(1)
        raise RuntimeError("illegal memory access")

    second: list[int] = []

    def other(a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        second.append(1)
        return out.add_(1)

    m = manager(backend("a", kernel("mix", "k", run)), backend("b", kernel("mix", "k", other)))
    out = torch.zeros(1)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        m.ops.mix(T, T, out=out)
    assert out.item() == 1 and not second


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="needs fork")
def test_fork_while_another_thread_holds_the_lock_deadlocks_the_child() -> None:
    """The lock is replaced, never waited on (`test_manager` does it with a real fork)."""
    m = manager(*answers("mix", ["a"]))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with m.lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    m.replace_locks()
    assert m.ops.mix(T, T) == "a"
    done.set()
    thread.join(20)


def test_re_registration_after_fork_raised() -> None:
    m = manager(*answers("mix", ["a"]))
    assert m.ops.mix(T, T) == "a"
    m.replace_locks()
    m.replace_snapshot(installed(*answers("mix", ["a"])))
    assert m.ops.mix(T, T) == "a"


def test_a_plugin_that_failed_half_way_stayed_half_registered() -> None:
    half = backend("half", kernel("mix", "good"), kernel("pack", "bad", claims={"fastest"}))
    snapshot = register([extension(half)], OPERATORS)
    assert not snapshot.backends and not snapshot.candidates("mix") and len(snapshot.failures) == 1


def test_a_later_registration_was_invisible_to_cached_calls() -> None:
    m = manager(*answers("mix", ["b"]))
    assert m.ops.mix(T, T) == "b"
    m.replace_snapshot(installed(*answers("mix", ["a", "b"])))
    assert m.ops.mix(T, T) == "a"


def test_one_unsupported_shape_sent_every_later_shape_to_the_reference() -> None:
    def kernel_of_some_shapes(a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        if a.shape[0] % 2:
            raise Declined("odd rows")
        return "fast"

    m = manager(backend("a", kernel("mix", "k", kernel_of_some_shapes)), *answers("mix", ["other"]))
    assert [m.ops.mix(torch.zeros(rows, 8), T) for rows in (3, 4, 3, 6, 5, 8)] == [
        "other", "fast", "other", "fast", "other", "fast",
    ]  # fmt: skip


# -- elsewhere --------------------------------------------------------------------------------------------------------


def test_a_missing_policy_file_silently_ignored(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    m = manager(*answers("mix", ["a"]), environ={"TE_DISPATCH_POLICY": missing})
    with pytest.raises(PolicyError, match=r"none\.yaml"):
        m.ops.mix(T, T)
    with pytest.raises(PolicyError, match=r"none\.yaml"):
        manager(*answers("mix", ["a"])).set_policy(missing)


def test_yaml_unreachable_because_of_an_environment_default(tmp_path: Path) -> None:
    """A variable that is not set, or set to nothing, takes no part."""
    file = tmp_path / "p.yaml"
    file.write_text("version: 1\nprefer: [b]\n")
    m = manager(*answers("mix", ["a", "b"]), environ={"TE_DISPATCH_POLICY": "", "TE_DISPATCH_PREFER": " "})
    m.set_policy(file)
    assert m.ops.mix(T, T) == "b"


def test_one_wrong_argument_call_marked_every_implementation_failed() -> None:
    m = manager(*answers("mix", ["a", "b"]))
    with pytest.raises(TypeError):
        m.ops.mix(T, T, T, T)
    with pytest.raises(TypeError):
        m.ops.mix(T, T, modus="plain")
    assert m.ops.mix(T, T) == "a" and not m.snapshot.unusable


def test_vendor_detection_by_racing_probes() -> None:
    """Two plugins that both claim a device: the one native to its vendor is believed, in whatever order they come."""

    def probe(vendor: str) -> str:
        return target(lambda index: DeviceFacts("cpu", vendor, f"{vendor}1", extra={"version.lib": vendor}))

    found = [
        backend("a", kernel("mix", "k", answering("mix", "a")), devices={"cpu": probe("guess")}),
        backend("z", kernel("mix", "k", answering("mix", "z")), vendors=("acme",), devices={"cpu": probe("acme")}),
    ]
    for seed in range(4):
        m = manager(*random.Random(seed).sample(found, 2))
        assert m.device_facts(torch.device("cpu")).vendor == "acme"
        assert m.ops.mix(T, T) == "z"


@pytest.mark.parametrize("value", ["false", "no", "2", "FALSE"])
def test_a_variable_parsed_as_true_whatever_it_said(value: str) -> None:
    m = manager(*answers("mix", ["a"]), environ={"NVTE_FLASH_ATTN": value})
    with pytest.raises(PolicyError, match=f"NVTE_FLASH_ATTN={value}"):
        m.ops.mix(T, T)


def test_an_incompatible_package_raised_import_error_out_of_a_users_call() -> None:
    m = manager(backend("a", kernel("mix", "k", target="te_dispatch_no_such_module:run")), *answers("mix", ["b"]))
    with m.policy(preferring("a")):
        assert m.ops.mix(T, T) == "b"


def test_rejection_reasons_lost_because_filtering_came_before_the_loop() -> None:
    snapshot = installed(
        backend("a", kernel("mix", "k", requires=(OneOf("device.vendor", "amd"),))),
        backend("b", kernel("mix", "k", requires=(OneOf("mode", "odd"), OneOf("a.dtype", "bf16")))),
        backend("c", kernel("mix", "k")),
        backend("d", kernel("mix@7", "k")),
        backend("e", kernel("mix", "k", requires=(OneOf("nonsense", 1),))),
    )
    policy = Policy(prefer=selectors("f"), rules=(rule("mix", deny=("c",)),))
    decision = resolve(TOYS["mix"], {"mode": "plain", "a.dtype": "fp32"}, CPU, policy, snapshot)
    assert {r.id: r.where for r in decision.rejected} == {
        "a.k": "device", "b.k": "call", "c.k": "policy", "d.k": "bind", "e.k": "bind", "f": "absence",
    }  # fmt: skip
    reasons = {r.id: r.reason for r in decision.rejected}
    assert "mode is plain" in reasons["b.k"] and "a.dtype is fp32" in reasons["b.k"], "every failure, not the first"


# -- stevedore --------------------------------------------------------------------------------------------------------


def test_stevedore_duplicates_that_are_not_adjacent_slipped_through() -> None:
    found = [extension(backend(n), distribution=f"acme-{i}") for i, n in enumerate(("twin", "b", "twin", "c", "twin"))]
    snapshot = register(found, OPERATORS)
    assert set(snapshot.backends) == {"b", "c"}
    assert all(f"acme-{i}" in snapshot.failures[0].reason for i in (0, 2, 4))


def test_stevedore_cached_entries_lost_their_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "acme_kept-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kept\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[te_dispatch.backends]\nkept = te_dispatch_toy_kept:MANIFEST\n")
    source = "from te_dispatch.core.manifest import Manifest\nMANIFEST = Manifest('kept', 1, ())\n"
    (tmp_path / "te_dispatch_toy_kept.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(3):
        found = discover({}).backends["kept"]
        assert (found.distribution, found.version) == ("acme-kept", "1.5")


# -- what users of such systems ask for -------------------------------------------------------------------------------


def test_no_silent_fallback_to_a_slow_device(caplog: pytest.LogCaptureFixture) -> None:
    m = manager(backend("a", kernel("mix", "k", answering("mix", "a"), traits={"emulated"})))
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        assert m.ops.mix(T, T) == "a"
    assert any("emulated" in r.getMessage() for r in caplog.records)


def test_fp8_encodings_told_apart() -> None:
    """A kernel written for one flavour of FP8 is not given the other."""
    snapshot = installed(
        backend("a", kernel("mix", "k", requires=(OneOf("a.dtype", "e4m3fn"), OneOf("device.encodings", "e4m3fn"))))
    )
    ocp = DeviceFacts("cuda", "nvidia", "sm_90", table=Arch(("e4m3fn",)))
    fnuz = DeviceFacts("cuda", "amd", "gfx942", table=Arch(("e4m3fnuz",)))
    for device, encoding, served in ((ocp, "e4m3fn", True), (ocp, "e4m3fnuz", False), (fnuz, "e4m3fn", False)):
        decision = resolve(TOYS["mix"], {"a.dtype": encoding}, device, Policy(), snapshot)
        assert bool(decision.accepted) == served


def test_forcing_a_backend_that_covers_only_some_operators() -> None:
    m = manager(*answers("mix", ["a", "b"]), backend("c", kernel("pack", "p", answering("pack", "c"))))
    with m.using(mix="b"):
        assert (m.ops.mix(T, T), m.ops.pack(T)) == ("b", "c")
