# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`benchmarks/ops.py` and `benchmarks/layer.py`: arguments, what they refuse to time, what they record. No times."""

from __future__ import annotations

import contextlib
import importlib
import json
from types import SimpleNamespace
from typing import Any

import layer
import ops
import pytest
import torch
from side_by_side import inputs, layers, report, rivals, targets, training_steps
from side_by_side.rows import Row, alternate_goal, rows

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("program", "argv", "message"),
    [
        (ops, ["--rivals", "cuda,acme"], "unknown acme; there are copy, cuda"),
        (ops, ["--ops", "gemv*"], "no row matches gemv*"),
        (ops, ["--rounds", "0"], "--rounds: at least 1"),
        (ops, ["--device", "acme"], "--device: RuntimeError"),
        (ops, ["--te", "/nowhere"], "no folder 'transformer_engine' in /nowhere"),
        (layer, ["--shapes", "A,B"], "--shapes: unknown B; there are A, A2, S"),
        (layer, ["--modes", "fp8"], "--modes: unknown fp8; there are bf16, delayed, current, block"),
        (layer, ["--contestants", "acme"], "none matches acme; there are te_dispatch;"),
        (layer, ["--dropout", "1"], "--dropout: from 0, below 1"),
        (layer, ["--rounds", "-1"], "--rounds: at least 1"),
    ],
)
def test_bad_arguments_are_named(
    program: Any, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        program.arguments(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_rows_are_unique_and_every_operation_is_known() -> None:
    names = [row.name for row in rows()]
    assert len(names) == len(set(names))
    assert {row.operation for row in rows()} == set(inputs.OPERATIONS)
    for name in rivals.MODULES:
        assert set(importlib.import_module(f"side_by_side.rivals.{name}").OPERATIONS) <= set(inputs.OPERATIONS)


def test_every_row_says_what_bounds_it() -> None:
    for row in rows():
        bookkeeping = row.operation == "update_scales"
        assert bookkeeping or bool(row.moved) != bool(row.flops), row.name


def test_operators_are_measured_and_recorded(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    record, page = tmp_path / "ops.json", tmp_path / "ops.md"
    argv = ["--device", "cpu", "--quick", "--ops", "rmsnorm bwd,delayed cast 8192x4096,adam*,causal*b 1"]
    assert ops.main([*argv, "--json", str(record), "--markdown", str(page), "--commit", "abc"]) == 0
    data = json.loads(record.read_text())
    assert data["machine"]["commit"] == "abc" and data["machine"]["torch"] == torch.__version__
    assert data["rivals"]["transformer_engine"] == "no CUDA device"
    found = {each["row"]: each["rivals"] for each in data["results"]}
    assert set(found["rmsnorm bwd"]) == {"copy", "torch_backend", "pytorch"}
    for name, by_rival in found.items():
        for rival, entry in by_rival.items():
            assert ("us" in entry) != ("refused" in entry), (name, rival)
    assert all("us" in by_rival["torch_backend"] for by_rival in found.values())
    assert found["adam, bf16 with fp32 master"]["pytorch"]["refused"].startswith("PyTorch's Adam")
    assert "transformer_engine is missing: no CUDA device" in capsys.readouterr().out
    assert page.read_text().count("| row |") == 3


def _rival(values: torch.Tensor) -> Any:
    def prepare(row: Row, data: Any) -> rivals.Prepared:
        return rivals.Prepared(lambda: None, lambda _: {"out": values})

    return SimpleNamespace(NAME="acme", scope=contextlib.nullcontext, OPERATIONS={"l2norm": prepare})


def test_whoever_is_wrong_is_not_timed() -> None:
    row = next(row for row in rows() if row.operation == "l2norm")
    options = ops.arguments(["--device", "cpu", "--quick", "--no-host"])
    right = inputs.expected(row, inputs.make(row, row.small, CPU, seed=1))["out"]
    assert "us" in ops.measure(row, [_rival(right)], options)["acme"]
    for wrong in (2 * right, torch.full_like(right, torch.nan), right.repeat(2)):
        entry = ops.measure(row, [_rival(wrong)], options)["acme"]
        assert "us" not in entry and entry["refused"], entry


def test_an_operation_that_a_rival_lacks_is_shown() -> None:
    row = next(row for row in rows() if row.operation == "gemm")
    options = ops.arguments(["--device", "cpu", "--quick", "--no-host"])
    assert ops.measure(row, [_rival(torch.ones(1))], options) == {"acme": {"refused": "has no gemm"}}


def test_a_layer_is_measured_and_recorded(tmp_path: Any) -> None:
    record = tmp_path / "layer.json"
    argv = ["--device", "cpu", "--quick", "--shapes", "S", "--modes", "bf16,delayed"]
    assert layer.main([*argv, "--contestants", "te_dispatch;torch+SDPA;transformer*", "--json", str(record)]) == 0
    data = json.loads(record.read_text())
    assert set(data["results"][0]["layers"]) == {"te_dispatch, bf16", "te_dispatch, delayed", "torch+SDPA, bf16"}
    assert set(data["results"][1]["linear"]) == {"te_dispatch, bf16", "te_dispatch, delayed", "torch.nn.Linear"}
    assert data["rivals"]["transformer_engine"] == "no CUDA device"


def test_a_layer_that_is_not_finite_is_refused() -> None:
    shape = layers.QUICK
    module = torch.nn.Linear(shape.hidden, shape.hidden, dtype=torch.bfloat16)
    with torch.no_grad():
        module.bias[0] = torch.inf
    broken = layers.Contestant("acme", ("bf16",), lambda: None, lambda *_: layers.Layer(module, module))
    options = layer.arguments(["--device", "cpu", "--quick", "--modes", "bf16"])
    options.chosen = [broken]
    trainees, refused = layer.field(shape, options)
    assert not trainees and refused == {"acme, bf16": "ArithmeticError: the output is not finite"}


def test_goals_fall_back_to_pytorch_where_transformer_engine_is_missing() -> None:
    te, sdpa = ("transformer_engine", "delayed"), ("torch+SDPA", "bf16")
    goal = targets.layer_goal("A", "delayed", {te: 11.0, sdpa: 17.4})
    assert goal is not None and goal.ms == pytest.approx(9.8) and "transformer_engine" in goal.source
    goal = targets.layer_goal("A", "delayed", {sdpa: 2 * 17.4})
    assert goal is not None and goal.ms == pytest.approx(2 * 9.8)
    assert targets.layer_goal("A", "delayed", {}) is None


def test_verdicts_say_by_how_much() -> None:
    assert report.verdict(9.0, 10.0) == "met (-10.0%)"
    assert report.verdict(11.0, 10.0) == "short by 10.0%"


@pytest.mark.parametrize(
    ("name", "slowest"),
    [("gemm fp8 8192x8192x8192", 125.0), ("gemm fp8 fc1 fprop 8192x16384x4096", 133.0), ("rmsnorm fwd", 111.0)],
)
def test_the_alternate_backend_is_held_to_a_share_of_the_subjects_speed(name: str, slowest: float) -> None:
    row = next(row for row in rows() if row.name.startswith(name))
    times = {"cuda": {"us": 100.0, "method": "graph"}, "triton": {"us": slowest, "method": "graph"}}
    kept = ops.judged(alternate_goal(row), times, "triton")
    times["triton"]["us"] = slowest + 2
    missed = ops.judged(alternate_goal(row), times, "triton")
    assert kept["met"] and not missed["met"]
    result = {"row": row.name, "goal": None, "group": "", "judged": {}, "alternate": missed, "rivals": times}
    found = [each for each in ops.tables([result], ["cuda", "triton"], "cuda") if "beside" in each["title"]]
    assert found[0]["rows"][0][2:4] == [f"{slowest + 2:.1f}", f"{slowest / 100 + 0.02:.2f}"]
    assert ops.judged(alternate_goal(row), {"triton": times["triton"]}, "triton") == {}  # nothing to compare with


def test_the_layer_on_triton_alone_has_a_goal_at_one_shape() -> None:
    goal = targets.triton_goal("A", "delayed", {("transformer_engine", "delayed"): 10.0})
    assert goal is not None and goal.ms == pytest.approx(12.0)
    assert targets.triton_goal("A", "bf16", {("transformer_engine", "bf16"): 10.0}) is None
    assert targets.triton_goal("A", "delayed", {}) is None


def test_the_layer_as_a_graph_has_a_goal_at_one_shape() -> None:
    measured = {("torch+SDPA", "bf16"): 2.0, ("transformer_engine", "bf16"): 1.0}
    goal = targets.graphed_goal("S", "delayed", measured)
    assert goal is not None and goal.ms == pytest.approx(0.7) and goal.source == "0.350x torch+SDPA bf16"
    assert targets.graphed_goal("A", "delayed", measured) is None
    assert targets.graphed_goal("S", "delayed", {}) is None


def test_a_graph_samples_what_a_step_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "te_dispatch.pytorch.make_graphed_callables", lambda *args, **kwargs: seen.append((args, kwargs))
    )
    contestant = next(each for each in layers.contestants() if each.name == targets.GRAPHED)
    for mode in layers.MODES:
        layer_of_mode = contestant.layer(layers.QUICK, mode, CPU, 0.0)
        (module, samples), settings = seen.pop()
        one = training_steps.trainee(layer_of_mode, layers.QUICK, CPU)
        assert module is layer_of_mode.module and settings["enabled"] is (mode != "bf16")
        (sample,) = samples
        assert (sample.shape, sample.dtype, sample.requires_grad) == (one.x.shape, one.x.dtype, one.x.requires_grad)
    assert contestant.missing() is None or not torch.cuda.is_available()
