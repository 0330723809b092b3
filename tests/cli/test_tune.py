# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""tune: what it asks a backend's tuning module, and what it makes of the answer. The backend here is planted."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from te_dispatch.cli import tune
from te_dispatch.cli.console import CommandError
from te_dispatch.core.manifest import API_VERSION, Implementation, Manifest
from te_dispatch.core.scopes import MANAGER
from te_dispatch.core.snapshot import InstalledBackend, Snapshot

_TUNING = """
import pathlib

OPERATORS = ("gemm",)
ASKED = []


def tune(calls, device=0, done=None):
    rows = []
    for place, call in enumerate(calls):
        ASKED.append((device, dict(call)))
        row = {"problem": None, "candidates": 3, "first_us": 10.0, "best_us": 8.0, "gain": 0.25, "place": 2,
               "algorithm": "algorithm 66"}
        if call["k"] == 7:
            row = {"problem": "nothing takes k = 7", "candidates": 0}
        rows.append({**call, **row})
        if done is not None:
            done(place, rows[-1])
    return rows


def cache_file():
    return pathlib.Path("/cache/acme.json")
"""


def backend(name: str, package: str) -> InstalledBackend:
    entry = Implementation("gemm@1", "gemm", f"{package}.gemm:gemm")
    return InstalledBackend(Manifest(name, API_VERSION, (entry,)), f"te-dispatch-{name}", "1.0")


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """A backend with a tuning module, one without, and one that cannot run here."""
    package = tmp_path / "acme_tuned_backend"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tuning.py").write_text(_TUNING)
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = [backend("acme", package.name), backend("plain", "json"), backend("away", package.name)]
    snapshot = Snapshot({one.name: one for one in installed}, unavailable={"away": "no device"})
    monkeypatch.setattr(tune, "MANAGER", SimpleNamespace(snapshot=snapshot, known=MANAGER.known))
    yield lambda: sys.modules[f"{package.name}.tuning"].ASKED
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        del sys.modules[name]


def test_a_shape_is_asked_of_every_backend_that_tunes(te, acme):
    answer = te(
        "tune", "--shape", "64x32x128", "a.dtype=e5m2", "b.dtype=e4m3fn", "layout=NN", "bias=true", "--device", "1"
    )
    assert answer.code == 0, answer.err
    assert "64 x 32 x 128" in answer.out and "25.0%" in answer.out and "/cache/acme.json" in answer.out
    assert acme() == [
        (1, {"m": 64, "n": 32, "k": 128, "layout": "NN", "a.dtype": "e5m2", "a.scaling": "tensor", "b.dtype": "e4m3fn",
             "b.scaling": "tensor", "out_dtype": None, "split_accumulator": None, "bias": True, "accumulate": False})
    ]  # fmt: skip


def test_json_and_the_exit_code_of_a_refused_product(te, acme):
    answer = te("tune", "--backend", "acme", "--shape", "8x8x8", "--shape", "8x8x7", "--json")
    assert answer.code == 1
    (told,) = answer.json["tuned"]
    assert told["backend"] == "acme" and [row["problem"] for row in told["rows"]] == [None, "nothing takes k = 7"]


def test_a_layer_is_its_products(te, acme):
    answer = te(
        "tune", "--layer", "hidden=64,ffn=256,tokens=128,kv=16,gated=1", "--recipe", "delayed", "--recipe", "block"
    )
    assert answer.code == 0, answer.err
    calls = [call for _, call in acme()]
    assert len(calls) == 2 * 4 * 4
    sizes = {(call["m"], call["n"], call["k"], call["layout"]) for call in calls}
    assert {(128, 96, 64, "NT"), (128, 64, 96, "NN"), (96, 64, 128, "TN"), (128, 512, 64, "NT")} <= sizes
    wgrad = next(call for call in calls if call["layout"] == "TN")
    assert wgrad["a.dtype"] == "e5m2" and wgrad["split_accumulator"]
    assert {call["b.scaling"] for call in calls if call["layout"] == "NT"} == {"tensor", "block_2d"}


REFUSED = (
    ((), "nothing to tune"),
    (("--shape", "1x2"), "MxNxK"),
    (("--shape", "1x0x2"), "MxNxK"),
    (("--layer", "hidden=4,ffn=8"), "lacks tokens"),
    (("--layer", "hiden=4"), "got 'hiden=4'"),
    (("--layer", "hidden=4,ffn=8,tokens=16", "--recipe", "fp8"), "--recipe takes bf16, delayed"),
    (("--layer", "hidden=4,ffn=8,tokens=16", "layout=NN"), "goes with --shape"),
    (("--shape", "1x2x3", "a.dtpe=bf16"), "did you mean 'a.dtype'"),
    (("--shape", "1x2x3", "--backend", "nobody"), "'nobody' is not installed"),
    (("--shape", "1x2x3", "--backend", "plain"), "plain has nothing to tune"),
    (("--shape", "1x2x3", "--backend", "away"), "away is unavailable: no device"),
)


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(a) or "nothing" for a, _ in REFUSED])
def test_mistakes_are_told_in_one_message(te, acme, arguments, message):
    answer = te("tune", *arguments)
    assert answer.code == 2 and message in answer.err, answer.err


def test_no_backend_tunes(monkeypatch):
    monkeypatch.setattr(tune, "MANAGER", SimpleNamespace(snapshot=Snapshot(), known=MANAGER.known))
    with pytest.raises(CommandError, match="no backend is installed"):
        tune._tunable(())
