# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""ops, explain, policy, plan: their answers, their JSON, and every way to be refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import te_dispatch
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.operator import OPERATORS, Decomposition
from te_dispatch.core.policy import Policy
from te_dispatch.core.resolve import resolve
from te_dispatch.core.scopes import MANAGER
from te_dispatch.core.shipped import shipped_policies

pytestmark = pytest.mark.sampled(8)

EVERY_VERB = (
    ("ops",),
    ("ops", "--family", "gemm"),
    ("ops", "--device", "nvidia:sm_90"),
    ("ops", "--device", "amd:gfx942"),
    ("ops", "gemm"),
    ("explain", "gemm", "dtype=bf16", "--device", "nvidia:sm_90"),
    ("explain", "attention_fwd", "dtype=bf16", "--device", "cpu", "--policy", "verify"),
    ("policy", "check", "FILE"),
    ("policy", "show"),
    ("policy", "show", "deterministic", "--origin"),
    ("policy", "schema"),
    ("policy", "list"),
)


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("version: 1\nprefer: [reference.gemm, nimbus]\noptional_backends: [nimbus]\n")
    return path


@pytest.mark.parametrize("arguments", EVERY_VERB, ids=" ".join)
def test_json_is_all_there_is_on_standard_output(te, policy_file, arguments):
    given = [str(policy_file) if a == "FILE" else a for a in arguments]
    answer = te(*given, "--json")
    assert answer.code == 0, answer.err
    assert isinstance(answer.json, dict)


@pytest.mark.parametrize("arguments", EVERY_VERB, ids=" ".join)
def test_every_verb_prints_for_people(te, policy_file, arguments):
    answer = te(*(str(policy_file) if a == "FILE" else a for a in arguments))
    assert answer.code == 0 and answer.out.strip()


REFUSED = (
    (("ops", "gem"), "did you mean 'gemm'"),
    (("ops", "--family", "gems"), "did you mean 'gemm'"),
    (("ops", "gemm", "--family", "gemm"), "leave OPERATOR away"),
    (("ops", "--device", "nvidia:sm_901"), "unknown arch 'sm_901'"),
    (("ops", "--device", "nvidai:sm_90"), "unknown vendor 'nvidai'"),
    (("explain", "gemmm"), "did you mean 'gemm'"),
    (("explain", "gemm", "a.dtpe=bf16", "--device", "cpu"), "did you mean 'a.dtype'"),
    (("explain", "gemm", "a.dtype=bf17", "--device", "cpu"), "did you mean 'bf16'"),
    (("explain", "gemm", "layout=XX", "--device", "cpu"), "layout: can never be 'XX'; known: NN, NT, TN"),
    (("explain", "gemm", "a.scaling=tensr", "--device", "cpu"), "did you mean 'tensor'"),
    (("explain", "gemm", "k=many", "--device", "cpu"), "k is a size"),
    (("explain", "gemm", "k", "--device", "cpu"), "fact=value"),
    (("explain", "gemm", "bias=maybe", "--device", "cpu"), "true or false"),
    (("explain", "gemm", "k=1", "k=2", "--device", "cpu"), "given twice"),
    (("explain", "gemm", "--policy", "defualt", "--device", "cpu"), "did you mean 'default'"),
    (("explain", "gemm", "--device", "cuda:77"), "cuda:77"),
    (("policy", "check", "nowhere.yaml"), "nowhere.yaml: no such policy file"),
    (("policy", "show", "strictest"), "neither a shipped policy nor a file"),
    (("plan", "check", "nowhere.lock"), "nowhere.lock cannot be read"),
)


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_mistakes_are_refused_with_one_message(te, arguments, message):
    answer = te(*arguments)
    assert answer.code == 2
    assert message in answer.err and answer.out == ""
    assert "Traceback" not in answer.err
    as_json = te(*arguments, "--json")
    assert as_json.code == 2 and message in as_json.json["error"] and message in as_json.err


# -- ops -------------------------------------------------------------------------------------------------------------


def test_the_matrix_holds_every_operator(te):
    rows = te("ops", "--json").json["operators"]
    assert [row["name"] for row in rows] == list(OPERATORS)
    gemm = next(row for row in rows if row["name"] == "gemm")
    assert gemm["state"] == "implemented" and gemm["backends"]["reference"]["implementations"] == ["reference.gemm"]


def test_a_device_rules_implementations_out(te):
    def torch_gemms(device: str) -> dict[str, object]:
        rows = te("ops", "--family", "gemm", "--device", device, "--json").json["operators"]
        return next(row for row in rows if row["name"] == "gemm")["backends"]["torch"]

    assert "torch.scaled_mm" in torch_gemms("nvidia:sm_90")["implementations"]
    old = torch_gemms("nvidia:sm_80")
    assert "torch.scaled_mm" not in old["implementations"]
    assert "fp8_matmul" in old["rejected"]["torch.scaled_mm"]


def test_the_contract_names_facts_and_requirements(te):
    data = te("ops", "gemm", "--json").json
    assert data["signature"].startswith("gemm(") and "layout" in data["signature"] and data["doc"]
    facts = {fact["name"]: fact["kind"] for fact in data["facts"]}
    assert facts["a.dtype"] == "dtype" and facts["k"] == "size" and facts["layout"] == "option"
    assert not any(name.endswith(".default") for name in facts)


#: What a fact may be, fitting or not: a policy, a script or a new operator describes calls that nobody makes.
_VALUES = ("current", "gelu", "tensor", "none", "e4m3fn", "bf16", "NT", None, True, False, 0, 7, 4096, 0.5, (1, 2))


@pytest.mark.parametrize("name", OPERATORS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_composites_take_no_fact_for_granted(name, data):
    """`ops` and `explain` ask about calls that are half known; no decomposition may raise for what is missing."""
    operator = OPERATORS[name]
    call = data.draw(st.dictionaries(st.sampled_from(sorted(operator.facts)), st.sampled_from(_VALUES)))
    device = DeviceFacts(type="any", vendor="any", arch="any")
    decision = resolve(operator, call, device, Policy(), MANAGER.snapshot)
    composites = {f"composite.{d.name}" for d in operator.decompositions}
    seen = {one.id for one in (*decision.accepted, *decision.rejected)}
    assert {one for one in seen if one.startswith("composite.")} <= composites


def test_the_matrix_shows_a_broken_decomposition(te, monkeypatch):
    def pieces(call):
        raise KeyError("layout")

    operator = OPERATORS["layernorm_fwd"]
    broken = Decomposition(name="broken", pieces=pieces, build=lambda: None)
    decompositions = [*operator.decompositions, broken]
    monkeypatch.setitem(OPERATORS, operator.name, dataclasses.replace(operator, decompositions=decompositions))
    monkeypatch.delenv("TE_DISPATCH_TRACEBACK", raising=False)
    answer = te("ops", "--family", "norm")
    assert answer.code == 2 and "unexpected KeyError: 'layout'" in answer.err


# -- explain ---------------------------------------------------------------------------------------------------------


def test_policy_lines_and_reasons_are_shown(te, policy_file):
    data = te("explain", "gemm", "dtype=bf16", "-d", "nvidia:sm_90", "-p", str(policy_file), "--json").json
    assert data["chosen"] == "reference.gemm"
    assert data["accepted"][0]["origin"] == f"{policy_file}:2:10"
    assert any(r["id"] == "nimbus" and r["where"] == "absence" for r in data["rejected"])
    assert data["call"]["a.dtype"] == data["call"]["b.dtype"] == "bf16"
    assert "k" in data["unknown"] and "a.dtype" not in data["unknown"]
    shown = te("explain", "gemm", "dtype=bf16", "-d", "nvidia:sm_90", "-p", str(policy_file)).out
    # A table wraps long paths at any character: put the column's lines together again.
    cells = [line.split("│") for line in shown.splitlines() if line.startswith("│")]
    where = "".join(cell[5].strip() for cell in cells)
    assert "chosen" in shown and f"{policy_file.name}:2:10" in where


def test_a_call_that_nothing_serves_is_an_answer(te):
    answer = te("explain", "gemm", "-d", "nvidia:sm_90", "-p", "triton-only", "--json")
    if answer.code == 0:
        pytest.skip("the Triton backend is installed")
    assert answer.code == 1 and answer.json["chosen"] is None and answer.json["rejected"]
    assert "Nothing serves this call" in te("explain", "gemm", "-d", "nvidia:sm_90", "-p", "triton-only").out


def test_composites_are_trees(te, tmp_path):
    path = tmp_path / "composed.yaml"
    path.write_text("version: 1\nprefer: [composite.layernorm_then_quantize]\n")
    arguments = ("explain", "layernorm_fwd", "dtype=bf16", "quantizer=current", "quantizer.encoding=e4m3fn")
    arguments += ("-d", "cpu", "-p", str(path))
    data = te(*arguments, "--json").json
    assert data["chosen"] == "composite.layernorm_then_quantize"
    pieces = data["accepted"][0]["pieces"]
    assert {piece["operator"] for piece in pieces.values()} == {"layernorm_fwd@1", "quantize@1"}
    shown = te(*arguments).out
    assert "layernorm_fwd -> " in shown and "quantize -> " in shown


def test_given_facts_bring_their_presence_along(te):
    call = te("explain", "gemm", "dtype=bf16", "bias=true", "out_quantizer=delayed", "-d", "cpu", "--json").json
    assert call["call"]["bias"] is True
    assert "bias.dtype" in call["unknown"], "a given bias has a dtype, though not a known one"
    assert call["call"]["out_quantizer.scaling"] == "tensor" and "out_quantizer.encoding" in call["unknown"]
    assert call["call"]["a.scaling"] == "none", "bf16 is not quantized"
    quantized = te("explain", "gemm", "a.dtype=e4m3fn", "-d", "cpu", "--json").json
    assert "a.scaling" in quantized["unknown"]


# -- policy ----------------------------------------------------------------------------------------------------------


def test_errors_say_file_line_and_column(te, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("version: 1\nprefer: [torhc]\n")
    answer = te("policy", "check", str(path))
    assert answer.code == 2
    assert answer.err.startswith(f"te-dispatch: {path}:2:10: ") and "did you mean 'torch'" in answer.err


def test_checking_tells_what_is_not_installed(te, policy_file):
    data = te("policy", "check", str(policy_file), "--json").json
    assert data["ok"] and "nimbus" in data["absent_backends"] and "reference" not in data["absent_backends"]


def test_origins_are_shown(te):
    data = te("policy", "show", "deterministic", "--json").json
    origin = {line["key"]: line for line in data["origins"]}["numerics.deterministic"]
    assert origin["value"] is True and "deterministic.yaml:" in origin["origin"]


def test_the_environment_is_part_of_what_is_shown(te_process):
    data = te_process("policy", "show", "--json", TE_DISPATCH_PREFER="gemm=reference.gemm").json
    assert any(line["origin"] == "TE_DISPATCH_PREFER=gemm=reference.gemm" for line in data["origins"])
    answer = te_process("policy", "show", TE_DISPATCH_POLICY="nonsense")
    assert answer.code == 2 and "TE_DISPATCH_POLICY=nonsense" in answer.err


def test_shipped_policies_are_listed_and_pass_their_own_check(te):
    found = te("policy", "list", "--json").json["policies"]
    assert [p["name"] for p in found] == list(shipped_policies())
    for policy in found:
        assert policy["description"] and te("policy", "check", policy["file"]).code == 0


def test_the_schema_accepts_the_shipped_policies(te):
    jsonschema = pytest.importorskip("jsonschema")
    yaml = pytest.importorskip("yaml")
    schema = te("policy", "schema").json
    for path in shipped_policies().values():
        jsonschema.validate(yaml.safe_load(path.read_text()), schema)


# -- plan ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lock_file(tmp_path: Path) -> Path:
    torch = pytest.importorskip("torch")
    from te_dispatch import ops

    ops.gemm(torch.ones(16, 16), torch.ones(16, 16), layout="NT")
    path = tmp_path / "plan.lock"
    te_dispatch.freeze().save(path)
    return path


def test_a_plan_of_this_machine_fits(te, lock_file):
    answer = te("plan", "check", str(lock_file), "--json")
    assert answer.code == 0 and answer.json["ok"] and len(answer.json["digest"]) == 64
    assert "OK" in te("plan", "check", str(lock_file)).out


def test_differences_are_told_and_exit_with_1(te_process, lock_file):
    answer = te_process("plan", "check", str(lock_file), "--json", TE_DISPATCH_PREFER="gemm=reference.gemm")
    assert answer.code == 1 and not answer.json["ok"]
    assert any("reference.gemm" in line for line in answer.json["differences"])
    shown = te_process("plan", "check", str(lock_file), TE_DISPATCH_PREFER="gemm=reference.gemm")
    assert shown.code == 1 and "does not fit this machine" in shown.out


def test_an_edited_plan_is_refused(te, lock_file):
    data = json.loads(lock_file.read_text())
    data["choices"][0]["chosen"] = "torch.other"
    lock_file.write_text(json.dumps(data))
    answer = te("plan", "check", str(lock_file))
    assert answer.code == 2 and "digest" in answer.err
