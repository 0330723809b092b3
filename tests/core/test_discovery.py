# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Discovery: what becomes a backend, what becomes a failure, and that a failure is its plugin's alone."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from te_dispatch.core import discovery
from te_dispatch.core.discovery import discover, misspelt_groups, register
from te_dispatch.core.manager import OpManager
from te_dispatch.core.manifest import API_VERSION, Manifest
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.requirements import All, AnyOf, OneOf, OnVendor
from te_dispatch.core.snapshot import Snapshot
from tests.core.toy import TOYS, backend, extension, kernel

pytestmark = pytest.mark.usefixtures("toy_operators")


def reasons(snapshot: Snapshot) -> dict[str, str]:
    return {f.name: f.reason for f in snapshot.failures}


# -- register ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [0, 3])
def test_duplicate_names_are_an_error_that_names_both_and_registers_neither(between: int) -> None:
    same = [
        extension(backend("twin", kernel("mix", "k")), distribution=d, version=v)
        for d, v in (("acme-a", "1"), ("acme-b", "2"))
    ]
    others = [extension(backend(f"other{i}", kernel("mix", "k"))) for i in range(between)]
    snapshot = register([same[0], *others, same[1]], OPERATORS)
    assert set(snapshot.backends) == {f"other{i}" for i in range(between)}
    assert [f.distribution for f in snapshot.failures] == ["acme-a", "acme-b"]
    for failure in snapshot.failures:
        assert "acme-a 1 and acme-b 2" in failure.reason and "uninstall one" in failure.reason


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ({"name": "a"}, "its entry point is dict, not a"),
        (None, "its entry point is NoneType"),
        (Manifest, "its entry point is type"),
        (
            backend("a", api_version=API_VERSION + 1),
            f"api_version is {API_VERSION + 1}, this te_dispatch speaks 1 and {API_VERSION}",
        ),
        (backend("a", api_version="1"), "api_version is '1'"),
        (backend("b"), "the manifest is named 'b', the entry point 'a'"),
        (backend("a", kernel("mix", "k"), kernel("pack", "k")), "'k' is declared twice"),
        (backend("a", kernel("mix", "K!")), "must be lower-case"),
        (backend("a", kernel("mix@x", "k")), "op must read 'operator@version'"),
        (backend("a", kernel("mix", "k", target="no_colon")), "target must read 'module:attribute'"),
        (backend("a", kernel("mix", "k", claims={"fast"})), "unknown claim 'fast'"),
        (backend("a", kernel("mix", "k", traits={"quick"})), "unknown trait 'quick'"),
        (backend("a", kernel("mix", "k", requires=("bf16",))), "requires holds 'bf16', which is no condition"),
        (backend("a", kernel("mix", "k", requires=(All(AnyOf(7)),))), "which is no condition"),  # type: ignore[arg-type]
        (backend("a", kernel("mix", "k", requires=(OnVendor("x", None),))), "which is no condition"),  # type: ignore[arg-type]
        (backend("a", kernel("mix", "k", rank="high")), "rank must be a whole number"),
        (backend("a", "mix"), "implementations holds str"),  # type: ignore[arg-type]
        (backend("a", kernel("mix", 7)), "implementation 7: the name must be lower-case"),  # type: ignore[arg-type]
    ],
)
def test_a_manifest_that_breaks_the_contract_is_its_own_failure(manifest: Any, reason: str) -> None:
    snapshot = register([extension(manifest, name="a"), extension(backend("ok", kernel("mix", "k")))], OPERATORS)
    assert set(snapshot.backends) == {"ok"}
    assert reason in reasons(snapshot)["a"]
    assert str(snapshot.failures[0]).startswith("backend 'a' of te-dispatch-a 1.0: ")


@pytest.mark.parametrize("name", ["native", "composite"])
def test_reserved_names_are_refused(name: str) -> None:
    assert "is reserved" in reasons(register([extension(backend(name))], OPERATORS))[name]


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("mix@2", "written for mix@2, this te_dispatch has mix@1"),
        ("mixx@1", "operator 'mixx' does not exist"),
    ],
)
def test_another_operator_version_costs_that_implementation_only(op: str, reason: str) -> None:
    snapshot = register([extension(backend("a", kernel(op, "k"), kernel("pack", "p")))], OPERATORS)
    assert set(snapshot.backends) == {"a"} and list(snapshot.unusable) == ["a.k"]
    assert reason in snapshot.unusable["a.k"]


def test_a_requirement_on_a_fact_that_does_not_exist_is_told_and_not_assumed() -> None:
    requires = (AnyOf(OneOf("mode", "odd"), OneOf("moode", "odd")),)
    snapshot = register([extension(backend("a", kernel("mix", "k", requires=requires)))], OPERATORS)
    assert snapshot.unusable == {"a.k": "requires a fact that mix does not have: moode; did you mean 'mode'?"}
    fine = (OneOf("device.version.anything", "1"),)
    assert not register([extension(backend("a", kernel("mix", "k", requires=fine)))], OPERATORS).unusable


def test_order_does_not_matter() -> None:
    found = [
        extension(backend("twin"), distribution="acme-b"),
        extension(backend("twin"), distribution="acme-a"),
        *(extension(backend(n, kernel("mix", "k"))) for n in "zya"),
        extension(7, name="seven"),
    ]
    first = register(found, TOYS)
    for seed in range(10):
        again = register(random.Random(seed).sample(found, len(found)), TOYS)
        assert list(again.backends.items()) == list(first.backends.items())
        assert sorted(map(str, again.failures)) == sorted(map(str, first.failures))


# -- discover: distributions on a path --------------------------------------------------------------------------------

MANIFEST = "from te_dispatch.core.manifest import Manifest\nMANIFEST = Manifest({name!r}, 1, ())\n"


def distribution(path: Path, name: str, module: str, entry_points: str, version: str = "1.0") -> None:
    info = path / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    (path / f"{name.replace('-', '_')}_plugin.py").write_text(module)


def plugin(path: Path, backend_name: str, module: str | None = None, distribution_name: str | None = None) -> None:
    name = distribution_name or f"acme-{backend_name}"
    point = f"{name.replace('-', '_')}_plugin:MANIFEST"
    source = MANIFEST.format(name=backend_name) if module is None else module
    distribution(path, name, source, f"[te_dispatch.backends]\n{backend_name} = {point}\n")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on an otherwise unchanged path; what is installed beside it is left out of the comparisons."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [n for n in sys.modules if n.endswith("_plugin")]:
        del sys.modules[name]


def found() -> tuple[set[str], dict[str, str]]:
    snapshot = discover(OPERATORS)
    acme = {b.name for b in snapshot.backends.values() if b.distribution.startswith("acme")}
    return acme, {f.name: f.reason for f in snapshot.failures}


def test_a_plugin_is_found_with_its_distribution(path: Path) -> None:
    plugin(path, "x1")
    backend_found = discover(OPERATORS).backends["x1"]
    assert (backend_found.distribution, backend_found.version) == ("acme-x1", "1.0")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import te_dispatch_no_such_library", "ModuleNotFoundError"),
        ("assert False, 'wrong CUDA'", "AssertionError: wrong CUDA"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise OSError('libacme.so')", "libacme.so"),
        ("syntax error here", "SyntaxError"),
        ("OTHER = 1", "MANIFEST"),
        ("class Skipped(BaseException): pass\nraise Skipped('not here')", "Skipped: not here while it was imported"),
        ("raise GeneratorExit", "raised GeneratorExit"),
        ("VALUES = {}\n\nVALUES['x']", "KeyError: 'x', at "),
        ("VALUES = {}\n\nVALUES['x']", "acme_bad_plugin.py:3"),
        ("MANIFEST = lambda: None", "its entry point is function"),
    ],
)
def test_a_plugin_that_fails_is_loud_and_alone(
    path: Path, source: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    plugin(path, "bad", source)
    plugin(path, "good")
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        backends, failures = found()
    assert backends == {"good"} and reason in failures["bad"]
    (message,) = [r.getMessage() for r in caplog.records if "bad" in r.getMessage()]
    assert "acme-bad 1.0" in message and reason in message


def test_implementations_that_cannot_be_used_are_warned_of(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Calls went to other backends, and nothing but doctor said why."""
    source = (
        "from te_dispatch.core.manifest import Implementation, Manifest\n"
        "from te_dispatch.core.requirements import OneOf\n"
        "def one(name, fact):\n"
        "    return Implementation('mix@1', name, 'nowhere:f', requires=(OneOf(fact, 'odd'),))\n"
        "MANIFEST = Manifest('half', 1, (one('k', 'moode'), one('l', 'moode'), one('m', 'mode')))\n"
    )
    plugin(path, "half", source)
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        discover(OPERATORS)
    assert [r.getMessage() for r in caplog.records if "half" in r.getMessage()] == [
        "backend 'half' of acme-half 1.0: 2 implementations (half.k, half.l): requires a fact that mix does not have: "
        "moode; did you mean 'mode'?"
    ]


def test_a_malformed_distribution_elsewhere_breaks_nothing(path: Path) -> None:
    distribution(path, "unrelated", "", "[console_scripts\nthis is = not : valid = at all\n[[")
    broken = path / "nameless-1.dist-info"
    broken.mkdir()
    (broken / "entry_points.txt").write_bytes(b"\xff\xfe[te_dispatch.backends]\nq = q:q")
    plugin(path, "good")
    backends, _ = found()
    assert backends == {"good"}


def test_a_malformed_distribution_that_means_us_is_told(path: Path) -> None:
    distribution(path, "acme-torn", "", "[te_dispatch.backends]\nno equals sign\n")
    plugin(path, "good")
    snapshot = discover(OPERATORS)
    assert "good" in snapshot.backends
    assert any("torn" in str(f) for f in snapshot.failures), snapshot.failures


def test_a_manifest_that_takes_long_to_import_is_told(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every program waited, and neither it nor doctor said for whom."""
    monkeypatch.setattr(discovery, "SLOW", 0.2)
    plugin(path, "slow", "import time; time.sleep(0.3)\n" + MANIFEST.format(name="slow"))
    plugin(path, "quick")
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        found()
    [told] = [r.getMessage() for r in caplog.records if "to import" in r.getMessage()]
    assert told.startswith("the manifest of backend 'slow' took 0.")


def test_a_group_that_nothing_reads_is_told(path: Path) -> None:
    """Doctor said nothing of a distribution that declared its backend in ``te_dispatch.backend``."""
    for name, group in (
        ("lost", "te_dispatch.backend"),
        ("strayed", "te-dispatch.backends"),
        ("else", "torch.backends"),
    ):
        distribution(path, f"acme-{name}", "", f"[{group}]\n{name} = acme:MANIFEST\n")
    plugin(path, "good")
    assert sorted(misspelt_groups()) == [
        f"acme-{name} 1.0 declares {name!r} in the entry point group {group!r}, which nothing reads; backends are "
        "declared in 'te_dispatch.backends'"
        for name, group in (("lost", "te_dispatch.backend"), ("strayed", "te-dispatch.backends"))
    ]


def test_a_doubled_path_is_not_a_duplicate(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(path, "x1")
    other = tmp_path / "again"
    distribution(other, "Acme_X1", "", "[te_dispatch.backends]\nx1 = acme_x1_plugin:MANIFEST\n", "0.9")
    monkeypatch.setattr(sys, "path", [*sys.path, str(path), str(other)])
    snapshot = discover(OPERATORS)
    assert snapshot.backends["x1"].version == "1.0" and "x1" not in reasons(snapshot)


def test_two_distributions_of_one_name_are_a_duplicate(path: Path) -> None:
    plugin(path, "x1")
    plugin(path, "x2")
    plugin(path, "x1", distribution_name="zeta-x1")
    backends, failures = found()
    assert backends == {"x2"}
    assert "acme-x1 1.0 and zeta-x1 1.0" in failures["x1"]


def test_a_package_installed_again_is_not_seen_stale(path: Path) -> None:
    plugin(path, "x1")
    assert found()[0] == {"x1"}
    plugin(path, "x2")
    assert found()[0] == {"x1", "x2"}


def test_the_traceback_of_a_plugin_is_shown_on_request(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(path, "bad", "def inner():\n    return {}['x']\n\ninner()\n")
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        discover(OPERATORS)
        assert "Traceback" not in caplog.text
        monkeypatch.setenv("TE_DISPATCH_TRACEBACK", "1")
        discover(OPERATORS)
    assert "Traceback (most recent call last)" in caplog.text and "in inner" in caplog.text


def test_an_interrupt_is_the_user_s_and_says_what_it_interrupted(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugin(path, "slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover(OPERATORS)
    assert "interrupted while the manifest of backend 'slow' was imported" in caplog.text


# -- manifests that do more than declare ------------------------------------------------------------------------------

TAMPERING = {
    "policy": ("import te_dispatch\nte_dispatch.set_policy('verify')\n", "set_policy is refused while"),
    "reload": ("import te_dispatch\nte_dispatch.reload_environment()\n", "reload_environment is refused while"),
    "scope": (
        "import te_dispatch\nfrom te_dispatch.core.policy import Policy\nte_dispatch.policy(Policy()).__enter__()\n",
        "a scoped policy is refused while the manifest of backend",
    ),
    "registry": (
        "from te_dispatch.core.scopes import MANAGER\nMANAGER.replace_snapshot(None)\n",
        "replace_snapshot is refused while",
    ),
    "operators": (
        "from te_dispatch.core.operator import OPERATORS\nOPERATORS.pop(next(iter(OPERATORS)))\n",
        "changed the operators",
    ),
    "environment": (
        "import os\nos.environ['TE_DISPATCH_PREFER'] = 'gemm=reference'\n",
        "changed the environment variables TE_DISPATCH_PREFER",
    ),
}


@pytest.mark.parametrize("what", TAMPERING)
def test_what_a_manifest_changes_while_it_is_imported_is_undone_and_told(path: Path, what: str) -> None:
    source, reason = TAMPERING[what]
    plugin(path, "tampers", source + MANIFEST.format(name="tampers"))
    plugin(path, "good")
    before, environ = dict(OPERATORS), dict(os.environ)
    backends, failures = found()
    assert backends == {"good"} and reason in failures["tampers"]
    assert dict(OPERATORS) == before and dict(os.environ) == environ


def test_a_manifest_that_fails_to_use_the_registry_costs_nobody_s_availability(path: Path) -> None:
    """Asking for the registry while it is made used to leave every backend counted as available."""
    touching = (
        "import te_dispatch.core.scopes as scopes\ntry:\n    scopes.MANAGER.snapshot\nexcept Exception:\n    pass\n"
    )
    plugin(path, "touching", touching + MANIFEST.format(name="touching"))
    absent = "MANIFEST = Manifest('absent', 1, (), unavailable='acme_absent_plugin:unavailable')\n"
    head = "from te_dispatch.core.manifest import Manifest\ndef unavailable(): return 'no driver'\n"
    plugin(path, "absent", head + absent)
    snapshot = OpManager(environ={}).snapshot
    assert {"touching", "absent"} <= set(snapshot.backends)
    assert snapshot.unavailable["absent"] == "no driver"
