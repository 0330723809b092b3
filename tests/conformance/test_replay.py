# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Recorded calls: their files, and making them again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.testing import CliRunner

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.cli.app import app
from te_dispatch.conformance import recording, replay, transfer
from te_dispatch.conformance.recording import Recording, copied
from te_dispatch.conformance.settings import UsageError
from te_dispatch.core import shadow
from te_dispatch.core.errors import ShadowMismatch
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer, MXFP8Quantizer, Quantizer
from te_dispatch.ops.results import Saved

from .shadowing import RECIPES, product, shadowing, steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("counts_from_zero")]


@pytest.fixture(scope="module")
def file(wrong: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A recorded call that the wrong backend got wrong."""
    policy = shadowing(tmp_path_factory.mktemp("calls"), prefer="wrong")
    with te_dispatch.policy(policy), pytest.raises(ShadowMismatch) as raised:
        ops.gemm(*product(), layout="NT")
    assert raised.value.file is not None
    return raised.value.file


def test_replay_fails_as_before_and_passes_on_a_right_backend(file: str) -> None:
    (again,) = replay.replay(file)
    assert again.state == "failed" and again.message.startswith("out[0, 3] is ")
    assert again.message == Recording.load(file).finding
    others = replay.replay(file, ["torch", "wrong"], isolated=False)
    states = {one.parsed.implementation: one.state for one in others}
    assert states["torch.matmul"] == "passed" and states["wrong.matmul"] == "failed"
    assert states["torch.emulated_gemm"] == "not_claimed"


def test_replay_on_the_command_line(file: str) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["conformance", "--replay", file]).exit_code == 1
    done = runner.invoke(app, ["conformance", "--replay", file, "--backend", "torch"])
    assert done.exit_code == 0 and "passed: torch.matmul/values/gemm.recorded[file=" in done.output.replace("\n", "")
    missing = runner.invoke(app, ["conformance", "--replay", file + "x"])
    assert missing.exit_code == 2 and "No such file" in missing.output.replace("\n", " ")


def test_a_recorded_unit_is_reproduced_by_its_id(file: str, tmp_path: Path) -> None:
    (again,) = replay.replay(file, isolated=False)
    done = CliRunner().invoke(app, ["conformance", "--unit", again.unit, "--in-process", "--out", str(tmp_path)])
    assert done.exit_code == 1, done.output
    assert json.loads((tmp_path / "conformance.json").read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "gone.matmul"}, "nothing here of gone.matmul implements gemm; what does: "),
        ({"operator": "gem"}, "'gem', which is no operator here"),
        ({"version": 7}, "gemm@7, here is gemm@1"),
        ({"against": "gone"}, "'gone' is not installed"),
        ({"format": 9}, "is of another format"),
        ({"arguments": 3}, "is no recorded call"),
        ({"unheard_of": 3}, "is no recorded call"),
        ({"operator": ["gemm"]}, "is no recorded call: TypeError: operator: got list, expected str"),
        ({"version": True}, "version: got bool, expected int"),
        ({"implementation": 3}, "implementation: got int, expected str"),
        ({"against": None}, "against: got NoneType, expected str"),
        ({"finding": []}, "finding: got list, expected str"),
        ({"versions": 3}, "versions: got int, expected dict"),
        ({"format": torch.zeros(3)}, "is no recorded call|is of another format"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(file: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    content = torch.load(file, weights_only=True)
    torch.save({**content, **change}, tmp_path / "call.pt")
    with pytest.raises(UsageError, match=message):
        replay.replay(tmp_path / "call.pt", isolated=False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a", 3, "holds no call of gemm: a: "),
        ("a", None, "holds no call of gemm: a: "),
        ("out", torch.zeros(2, 2), None),
        ("unheard_of", 3, "holds no call of gemm: argument 'unheard_of' is unknown"),
        (3, 3, "holds no call of gemm: argument 3 is unknown"),
        ("a", {"kind": "device", "name": "nowhere"}, "is no recorded call: RuntimeError"),
        ("a", {"kind": "dtype", "name": "load"}, "is no recorded call: TypeError: 'load' is no dtype"),
        ("a", {"kind": "dict", "items": [[[], 3]]}, "is no recorded call: TypeError"),
        ("a", {"kind": "dict", "items": [[1, 2, 3]]}, "is no recorded call: ValueError"),
        ("a", {"kind": "tuple", "items": 3}, "is no recorded call: TypeError"),
        ("a", {"kind": "Quantized"}, "is no recorded call: TypeError"),
        ("a", {"kind": "CurrentQuantizer", "encoding": 3}, "is no recorded call|holds no call"),
    ],
)
def test_an_argument_that_no_call_has_is_refused(
    file: str, name: Any, value: Any, message: str | None, tmp_path: Path
) -> None:
    content = torch.load(file, weights_only=True)
    content["arguments"][name] = value
    torch.save(content, tmp_path / "call.pt")
    if message is None:
        assert replay.replay(tmp_path / "call.pt", isolated=False)
        return
    with pytest.raises(UsageError, match=message):
        replay.replay(tmp_path / "call.pt", isolated=False)


def test_a_missing_argument_is_named(file: str, tmp_path: Path) -> None:
    content = torch.load(file, weights_only=True)
    del content["arguments"]["b"]
    torch.save(content, tmp_path / "call.pt")
    with pytest.raises(UsageError, match="holds no call of gemm: argument 'b' is missing"):
        replay.replay(tmp_path / "call.pt", isolated=False)


def test_other_files_are_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("nothing of the kind")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"format": 1, "code": print}, tmp_path / "code.pt")  # not plain data
    (tmp_path / "cut.pt").write_bytes(Path(file).read_bytes()[:-300])
    for name in ("text.pt", "list.pt", "code.pt", "cut.pt"):
        with pytest.raises(UsageError, match="is no recorded call"):
            replay.replay(tmp_path / name, isolated=False)
    with pytest.raises(UsageError, match="'tourch' is not installed"):
        replay.replay(file, ["tourch"], isolated=False)


def test_a_file_holds_every_kind_of_argument(tmp_path: Path) -> None:
    packed = torch.randn(4, 3, 8)
    record = ops.quantize(torch.randn(32, 32), MXFP8Quantizer(), usage="both")
    quantizer = DelayedQuantizer("e5m2", True, scale=torch.ones(1), amax=torch.zeros(1))
    arguments = {
        "views": [packed[:, 0], packed[:, 2].t()],
        "record": record,
        "quantizers": (quantizer, CurrentQuantizer("e4m3fnuz", epsilon=0.5)),
        "saved": Saved("a.b", "c", (packed, None), (1, torch.bfloat16, ("x", {"y": 2.5}))),
        "dtype": torch.float16,
        "nothing": None,
        "words": ["causal", True, 3, 1.5],
        "mean": torch.zeros(0, 5),
    }
    kept = Recording("gemm", 1, "torch.matmul", "reference", copied(arguments), "cpu")
    kept.save(tmp_path / "call.pt")
    found = Recording.load(tmp_path / "call.pt").arguments
    assert set(recording._QUANTIZERS.values()) == set(get_args(Quantizer))
    for (path, one), (other_path, other) in zip(transfer.tensors(arguments), transfer.tensors(found), strict=True):
        assert (path, one.stride(), one.dtype) == (other_path, other.stride(), other.dtype)
        assert torch.equal(one, other) and (not one.numel() or one.data_ptr() != other.data_ptr())
    first, second = found["views"]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert isinstance(found["record"], Quantized) and found["record"].shape == (32, 32)
    assert [type(one) for one in found["quantizers"]] == [DelayedQuantizer, CurrentQuantizer]
    assert (found["quantizers"][0].common, found["quantizers"][1].epsilon) == (True, 0.5)
    assert found["saved"].options == arguments["saved"].options and found["saved"].format == "c"
    assert (found["dtype"], found["nothing"], found["words"]) == (torch.float16, None, arguments["words"])


def test_a_file_of_what_is_no_plain_data_is_refused(tmp_path: Path) -> None:
    kept = Recording("gemm", 1, "torch.matmul", "reference", {"a": object()}, "cpu")
    with pytest.raises(shadow.NotComparable, match="a holds a object"):
        kept.save(tmp_path / "call.pt")
    assert not list(tmp_path.iterdir())


def test_only_what_a_view_covers_is_copied() -> None:
    large = torch.zeros(10_000_000)
    found = copied([large[1000:1010], large[5_000_000:5_000_010:3]])
    assert [one.untyped_storage().nbytes() < 4 * recording._ALIGNMENT for one in found] == [True, True]
    assert (
        found[0].storage_offset() * 4 % recording._ALIGNMENT
        == large[1000:1010].storage_offset() * 4 % recording._ALIGNMENT
    )


@pytest.mark.parametrize("operator", ["attention_bwd", "update_delayed_scales", "quantize", "layernorm_bwd"])
def test_calls_that_were_right_replay_as_right(operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them a backward that reads what its own forward saved, and operators that write their arguments."""
    monkeypatch.setattr(shadow.Sampler, "_tell", lambda *args: None)
    made: list[str] = []

    def keep(self: Any, result: Any, args: Any) -> None:
        if self.recording.operator == operator and not made:
            made.append(str(tmp_path / "call.pt"))
            self.save(made[0], "", "")

    from te_dispatch.conformance import comparing

    monkeypatch.setattr(comparing.Comparison, "finding", keep)
    layer = te.TransformerLayer(
        32, 64, 2, params_dtype=torch.bfloat16, device="cpu", hidden_dropout=0.0, attention_dropout=0.0
    )
    x = torch.randn(16, 1, 32, dtype=torch.bfloat16, requires_grad=True)
    with te_dispatch.policy(shadowing(tmp_path)):
        steps(layer, x, RECIPES["delayed"], 1)
    monkeypatch.undo()
    for backends in ((), ("torch",)):
        outcomes = replay.replay(made[0], backends, isolated=False)
        states = Counter(one.state for one in outcomes)
        assert states["passed"] >= 1 and not states["failed"], [(one.unit, one.message) for one in outcomes]
