# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What doctor and ``explain`` tell of mistakes that only show when a manifest is read as a whole, or beside others."""

from __future__ import annotations

import pytest

from tests.cli.test_doctor import _backend, _plugin, _source

pytestmark = pytest.mark.sampled(8)

_IMPORTS = """
from te_dispatch.core.facts import Arch
from te_dispatch.core.requirements import OneOf, OnVendor
def gemm(a, b, **options): pass
def one(op, *requires, **fields):
    return Implementation(op=f"{op}@1", name=fields.pop("name", op), target="absent:f", requires=requires, **fields)
"""
#: Backend -> its implementations.
_BACKENDS = {
    "misspelt": "tuple(one(op, OneOf('device.vender', 'acme')) for op in ('gemm', 'quantize', 'softmax_fwd'))",
    "never": "(one('softmax_fwd', OneOf('causal', True), OneOf('causal', False)), one('rmsnorm_fwd', "
    "OneOf('hidden', -1)), one('layernorm_fwd', OneOf('quantizer', 'block'), OneOf('quantizer', None)))",
    "newer": "(one('gemm', OneOf('device.arch', 'n9', 'n10')), one('quantize', OneOf('device.arch', 'n1', 'n9')))",
    "stranger": "(one('gemm', OneOf('device.vendor', 'acmxy')), "
    "one('quantize', OneOf('device.vendor', 'acmxy', 'amd')), "
    "one('softmax_fwd', OnVendor('acmyx', OneOf('causal', True))))",
    "halves": "(one('layernorm_bwd'), one('rmsnorm_bwd', saved_format='halves/1'), one('softmax_bwd'), "
    "one('softmax_fwd'))",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    for name, implementations in _BACKENDS.items():
        fields = (
            f"name={name!r}, vendors=('acme',), archs={{'acme': {{'n1': Arch()}}}}, "
            f"unavailable='{name}_backend:unavailable', implementations={implementations}"
        )
        _plugin(folder, name, _source(f"{_IMPORTS}\ndef unavailable(): return 'no device'", fields))
    return folder


@pytest.fixture(scope="module")
def told(folder, run_process):
    return run_process(folder, "doctor", "--json", path=folder)


def _problems(told, name):
    where = f"backend {name!r} of te-dispatch-{name} 9.9: "
    return [problem.removeprefix(where) for problem in told.json["problems"] if problem.startswith(where)]


def test_one_mistake_that_many_share_is_one_line(told):
    """It was a line for each, and one more that said the opposite."""
    assert _problems(told, "misspelt") == [
        "3 implementations (misspelt.gemm, misspelt.quantize, misspelt.softmax_fwd): requires 'device.vender is acme': "
        "there is no device fact 'vender'; did you mean 'vendor'?"
    ]


def test_requirements_that_never_hold_are_told(told):
    assert _problems(told, "never") == [
        "never.softmax_fwd: requires 'causal is True' and 'causal is False', which never hold together",
        "never.rmsnorm_fwd: requires 'hidden is -1': hidden is a size, got -1",
        "never.layernorm_fwd: requires 'quantizer is block' and 'quantizer is not given', which never hold together",
    ]


def test_an_arch_that_no_manifest_lists_is_noted(told):
    assert _problems(told, "newer") == []
    [note] = _backend(told, "newer")["notes"]
    assert note.startswith("newer.gemm: requires 'device.arch is n9 or n10', and no installed manifest lists such an")


def test_a_vendor_that_no_manifest_lists_is_noted(told):
    """A short name is too unlike any other to be taken for a slip."""
    assert _problems(told, "stranger") == []
    assert _backend(told, "stranger")["notes"] == [
        f"stranger.{name}: requires 'device.vendor is {vendor}', and no installed manifest lists such a vendor; "
        "did you mean 'acme'?"
        for name, vendor in (("gemm", "acmxy"), ("softmax_fwd", "acmyx"))
    ]


def test_a_backward_without_its_forward_is_noted(told):
    [note] = [note for note in _backend(told, "halves")["notes"] if "requires nothing of the device" not in note]
    assert note.startswith("halves.layernorm_bwd: halves has no layernorm_fwd that goes with it. It serves a backward ")
    assert "torch.layernorm_fwd" in note and "where their own backend's layernorm_bwd does not take the call" in note
    [problem] = _problems(told, "halves")
    assert problem == (
        "halves.rmsnorm_bwd: its saved format is 'halves/1', and no implementation of rmsnorm_fwd leaves it"
    )


def test_first_party_manifests_leave_nothing_to_note(told):
    assert {b["name"]: b["notes"] for b in told.json["backends"] if b["name"] not in _BACKENDS} == {
        b["name"]: [] for b in told.json["backends"] if b["name"] not in _BACKENDS
    }


def test_a_native_backend_s_implementation_for_every_device_is_noted(tmp_path, run_process):
    body = "from te_dispatch.core.requirements import OneOf\ndef kernel(*_, **__): ..."
    rows = (
        "Implementation(op='gemm@1', name='any', target='chip_backend:kernel', requires=(OneOf('layout', 'NT'),))",
        "Implementation(op='gemm@1', name='own', target='chip_backend:kernel', "
        "requires=(OneOf('device.vendor', 'chip'),))",
    )
    fields = f"name='chip', vendors=('chip',), archs={{'chip': {{}}}}, implementations=({', '.join(rows)},)"
    _plugin(tmp_path, "chip", _source(body, fields))
    told = run_process(tmp_path, "doctor", "--json", path=tmp_path)
    assert _backend(told, "chip")["notes"] == [
        "chip.any: requires nothing of the device, so it is a candidate on every device; "
        "OneOf('device.vendor', 'chip') keeps it to its own"
    ]


def test_notes_are_shown_and_break_nothing(tmp_path, run_process):
    fields = "name='halves', implementations=(Implementation('softmax_bwd@1', 'k', 'halves_backend:softmax_bwd'),)"
    _plugin(tmp_path, "halves", _source("def softmax_bwd(dy, y, *, scale=1.0, out_dtype=None): pass", fields))
    shown = run_process(tmp_path, "doctor", path=tmp_path)
    assert shown.code == 0 and "note: backend 'halves': halves.k: halves has no softmax_fwd that goes with" in shown.out
    shown = run_process(tmp_path, "explain", "softmax_bwd", path=tmp_path)
    told = "halves.k: no forward is bound with it while its own backend's softmax_bwd takes the call"
    assert told in shown.out
    assert "torch.softmax_bwd: no forward" not in shown.out
