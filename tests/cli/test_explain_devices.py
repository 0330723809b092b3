# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What ``explain``, ``ops`` and ``policy check`` say of devices that are here, of absent backends, and of facts."""

from __future__ import annotations

import re

import pytest

from te_dispatch.core.operator import OPERATORS
from tests.cli.test_doctor import _plugin, _source

pytestmark = pytest.mark.sampled(8)

_ZETA = _source(
    """
    from te_dispatch.core.facts import Arch, DeviceFacts
    from te_dispatch.core.requirements import OneOf
    def probe(index): return DeviceFacts("cpu", "zeta", "z2") if os.environ.get("ZETA") else None
    def unavailable(): return None if os.environ.get("ZETA") else "libzeta.so is missing"
    """,
    "name='zeta', vendors=('zeta',), archs={'zeta': {'z2': Arch()}}, devices={'cpu': 'zeta_backend:probe'}, "
    "unavailable='zeta_backend:unavailable', implementations=(Implementation(op='compute_amax@1', name='amax', "
    "target='zeta_backend:amax', requires=(OneOf('device.vendor', 'zeta'),)),)",
)


@pytest.mark.parametrize(("device", "shown"), [("cpu:0", "cpu (cpu)"), ("nvidia:sm_90", "nvidia:sm_90 (described)")])
def test_a_device_of_this_machine_is_not_a_description(te, device, shown):
    answer = te("explain", "gemm", "dtype=bf16", "--device", device)
    assert answer.code == 0 and f"on {shown}, policy" in answer.out


def test_an_index_is_no_arch_and_an_arch_is_no_index(te):
    answer = te("explain", "gemm", "--device", "nvidia:90")
    assert answer.code == 2 and "unknown arch '90'" in answer.err


def test_a_plugin_s_device_here_and_described(tmp_path, run_process):
    _plugin(tmp_path, "zeta", _ZETA)
    here = run_process(tmp_path, "explain", "compute_amax", path=tmp_path, ZETA="1")
    assert "on zeta:z2 (cpu), policy" in here.out and "the choice assumes" not in here.out
    described = run_process(tmp_path, "explain", "compute_amax", "--device", "zeta:z2", path=tmp_path)
    assert "on zeta:z2 (described), policy" in described.out
    assumption = "backend zeta works there, as it does not here (libzeta.so is missing)"
    assert f"the choice assumes: {assumption}" in described.out


def test_a_refused_backend_is_not_called_absent(tmp_path, run_process):
    _plugin(tmp_path, "zeta", "raise OSError('libzeta.so')\n")
    (tmp_path / "p.yaml").write_text("version: 1\nprefer: [zeta, yota]\noptional_backends: [zeta, yota]\n")
    answer = run_process(tmp_path, "policy", "check", "p.yaml", path=tmp_path)
    assert "zeta is skipped here: installed, but refused: cannot be imported: OSError: libzeta.so" in answer.out
    assert "yota is skipped here: not installed" in answer.out
    explained = run_process(
        tmp_path, "explain", "gemm", "--device", "cpu", "--policy", "p.yaml", "--json", path=tmp_path
    )
    reasons = {rejected["id"]: rejected["reason"] for rejected in explained.json["rejected"]}
    assert reasons["yota"] == "not installed" and reasons["zeta"].startswith("installed, but refused: ")


def test_every_decomposition_is_in_the_table(te):
    rows = {row["name"]: row for row in te("ops", "--json").json["operators"]}
    declared = {o.name: {f"composite.{d.name}" for d in o.decompositions} for o in OPERATORS.values()}
    assert {name: set(row["composites"]) for name, row in rows.items()} == declared


def test_facts_are_described_whole(te):
    facts = {fact["name"]: fact for fact in te("ops", "gemm", "--json").json["facts"]}
    assert facts["m"]["doc"] == "rows of the product, all together"
    assert facts["layout"]["words"] == ["NT", "NN", "TN"]
    for name in OPERATORS:
        told = te("ops", name, "--json").json["facts"]
        assert all(fact["doc"].strip() and fact["doc"].count("(") == fact["doc"].count(")") for fact in told), name
        assert not [fact["doc"] for fact in told if re.search(r"\b_\w+\(", fact["doc"])], name
    assert "the argument `kind`: gelu, qgelu, relu" in " ".join(te("ops", "activation_fwd").out.split())


def test_doctor_reads_every_variable(te_process):
    answer = te_process("doctor", "--json", TE_DISPATCH_CHECK_RESULTS="sometimes")
    [problem] = answer.json["problems"]
    assert problem == ("environment: TE_DISPATCH_CHECK_RESULTS=sometimes: expected 0 or 1, got 'sometimes'")
