# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The demo: two small runs with everything that is counted, its arithmetic, and every way to be refused."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import torch

from te_dispatch import ops
from te_dispatch.cli.console import CommandError
from te_dispatch.cli.demo.counting import lost
from te_dispatch.cli.demo.data import Batches, standard_library
from te_dispatch.cli.demo.options import SIZES, read_options
from te_dispatch.cli.demo.report import largest_gap, smoothed
from te_dispatch.cli.demo.train import BF16, Trainer, learning_rate, watched
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer

pytestmark = pytest.mark.slow

_STEPS, _HIDDEN, _LAYERS, _SEQ, _BATCH = 20, 64, 2, 32, 4
_ROWS = _SEQ * _BATCH
_SHAPE = {
    "hidden": _HIDDEN,
    "layers": _LAYERS,
    "heads": 4,
    "seq": _SEQ,
    "batch": _BATCH,
    "steps": _STEPS,
    "device": "cpu",
}
_ARGUMENTS = [text for name, value in _SHAPE.items() for text in (f"--{name}", str(value))]
#: (in, out) of every linear layer that FP8 casts: qkv, projection, two of the MLP. The head stays in BF16.
_LINEARS = [(64, 192), (64, 64), (64, 256), (256, 64)] * _LAYERS


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The document of a run in BF16 and with every recipe, and its folder."""
    from typer.testing import CliRunner

    from te_dispatch.cli.app import app

    folder = tmp_path_factory.mktemp("demo") / "results"
    result = CliRunner().invoke(app, ["demo", *_ARGUMENTS, "-r", "all", "-o", str(folder), "-q", "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), folder


def _run(demo, name):
    return next(run for run in demo[0]["runs"] if run["name"] == name)


# -- a whole demo ----------------------------------------------------------------------------------------------------


def test_files_are_written_and_say_the_same(demo):
    document, folder = demo
    assert sorted(p.name for p in folder.iterdir()) == ["te_dispatch_demo.json", "te_dispatch_demo.png"]
    assert json.loads((folder / "te_dispatch_demo.json").read_text()) == document
    picture = (folder / "te_dispatch_demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert document["complete"] and "error" not in document


def test_all_runs_learn_from_the_same_start(demo):
    document, _ = demo
    assert [run["name"] for run in document["runs"]] == ["bf16", "delayed", "current", "block"]
    assert len({run["initial_weights"] for run in document["runs"]}) == 1
    for run in document["runs"]:
        assert run["steps_done"] == len(run["losses"]) == _STEPS
        assert sum(run["losses"][-5:]) < sum(run["losses"][:5]) - 1.0
        assert run["tokens_per_second"] > 0 and run["observed_tokens_per_second"] > 0
        assert 0 < run["validation_loss"] < run["losses"][0]


def test_fp8_is_close_to_bf16_and_not_the_same(demo):
    reference = _run(demo, "bf16")
    assert reference["gap_to_bf16"] is None
    for name in ("delayed", "current", "block"):
        run = _run(demo, name)
        assert run["losses"] != reference["losses"]
        assert abs(run["losses"][0] - reference["losses"][0]) < 0.05, "one forward in FP8"
        assert 0 < abs(run["gap_to_bf16"]["relative"]) < 0.05


def test_calls_are_counted_exactly(demo):
    for run in demo[0]["runs"]:
        calls: dict[str, int] = {}
        for row in run["calls"]:
            calls[row["operator"]] = calls.get(row["operator"], 0) + row["calls"]
        assert calls["gemm"] == 3 * (len(_LINEARS) + 1) * _STEPS  # and the head
        assert calls["attention_fwd"] == calls["attention_bwd"] == _LAYERS * _STEPS
        assert calls["layernorm_fwd"] == (2 * _LAYERS + 1) * _STEPS
    assert not any("quantize" in row["operator"] for row in _run(demo, "bf16")["calls"])
    update = next(r for r in _run(demo, "delayed")["calls"] if r["operator"] == "update_delayed_scales")
    assert update["calls"] == 2 * _STEPS, "forward scales and backward scales"


def test_casts_are_told_apart_by_role(demo):
    assert _run(demo, "bf16")["casts"] == {}
    for name in ("delayed", "current", "block"):
        run = _run(demo, name)
        steps = len(run["watched_steps"])
        assert steps == 10 and run["watched_steps"][0] == 1 and run["watched_steps"][-1] == _STEPS
        values = {role: counts["values"] for role, counts in run["casts"].items()}
        assert values == {
            "activation": steps * _ROWS * sum(i for i, _ in _LINEARS),
            "weight": steps * sum(i * o for i, o in _LINEARS),
            "gradient": steps * _ROWS * sum(o for _, o in _LINEARS),
        }
    assert sum(c["saturated"] for c in _run(demo, "block")["casts"].values()) == 0, (
        "blocks are scaled to their own amax"
    )
    assert _run(demo, "delayed")["casts"]["gradient"]["underflowed"] > 0, "the first step's scale is 1"


def test_where_it_ran_is_told(demo):
    document, _ = demo
    assert document["device"]["vendor"] == "cpu" and document["arguments"]["device"] == "cpu"
    assert len(document["plan_digest"]) == 64 and document["policy"]["name"] == "default"
    assert document["versions"]["torch"] == str(torch.__version__)
    assert document["corpus"]["train_bytes"] > document["corpus"]["validation_bytes"] > 0


def test_tables_and_progress(te, tmp_path):
    arguments = [*_ARGUMENTS, "--steps", "2", "--log-every", "1", "-o", str(tmp_path)]
    answer = te("demo", *arguments)
    assert answer.code == 0
    for words in ("Losses in nats per byte", "Calls of the training steps", "Casts to FP8", "torch.matmul"):
        assert words in answer.out
    assert "step     2/2" in answer.err and "tokens/s" in answer.err


# -- training --------------------------------------------------------------------------------------------------------


def test_a_run_depends_on_its_seed_alone():
    options = read_options({**_SHAPE, "steps": 3})
    corpus = standard_library()

    def losses(seed: int) -> list[float]:
        trainer = Trainer(read_options({**_SHAPE, "steps": 3, "seed": seed}), BF16, corpus)
        return [float(trainer.step(n)) for n in range(options.steps)]

    assert losses(1) == losses(1) != losses(2)


def test_learning_rate_warms_up_and_decays():
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and max(rates) == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[9:])) and 0.1 <= rates[-1] < 0.11


def test_watched_steps():
    assert watched(1) == [0] and watched(3) == [0, 1, 2]
    assert len(watched(1000)) == 10 and watched(1000)[0] == 0 and watched(1000)[-1] == 999


# -- data ------------------------------------------------------------------------------------------------------------


def test_corpus_is_sorted_split_and_without_tests(tmp_path):
    for number in range(20):
        (tmp_path / f"m{number:02}.py").write_text(f"{number:02}")
    for skipped in ("test", "site-packages"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "a.py").write_text("SKIPPED")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "z.py").write_text("zz")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    corpus = standard_library(tmp_path)
    names = [f"{n:02}" for n in range(20)] + ["zz"]
    expected = [n for i, n in enumerate(names, 1) if i % 10], [n for i, n in enumerate(names, 1) if i % 10 == 0]
    for text, wanted in zip((corpus.train, corpus.validation), expected):
        assert bytes(text.tolist()).decode().split("\0") == wanted
    assert corpus.files == (19, 2) and corpus.digest == standard_library(tmp_path).digest


def test_too_little_text_is_refused(tmp_path):
    with pytest.raises(CommandError, match="0 readable Python source files"):
        standard_library(tmp_path)
    with pytest.raises(CommandError, match="--seq 64: expected less than the 64 bytes"):
        Batches(torch.zeros(64, dtype=torch.uint8), 64, 2, torch.device("cpu"))


def test_targets_are_the_next_bytes():
    batches = Batches(torch.arange(200, dtype=torch.uint8), 16, 3, torch.device("cpu"))
    starts = batches.order(5, 7)
    assert torch.equal(starts, batches.order(5, 7)) and not torch.equal(starts, batches.order(5, 8))
    x, y = batches.at(starts[0])
    assert x.shape == (3, 16) and torch.equal(x[:, 0], starts[0]) and torch.equal(y, x + 1)
    assert int(batches.spread(4).max()) == 200 - 17


# -- arithmetic ------------------------------------------------------------------------------------------------------


def _rounding(steps: int, largest: float) -> float:
    """What float64 rounds in a moving average: seven operations a step, of numbers up to `largest`."""
    return 7 * steps * 2**-53 * largest


def test_smoothing_starts_at_the_first_value_and_forgets():
    assert all(abs(found - 4.0) <= _rounding(3, 4.0) for found in smoothed([4.0, 4.0, 4.0], 5))
    # Weight 1/2: (1/2 * 8 + 1/4 * 2) / (3/4)
    assert smoothed([2.0, 8.0], 3)[0] == 2.0 and abs(smoothed([2.0, 8.0], 3)[1] - 6.0) <= _rounding(2, 8.0)


def test_the_largest_gap_has_a_sign_and_a_place():
    reference = [2.0] * 30
    worse = [2.0] * 20 + [3.0] + [2.0] * 9
    gap = largest_gap(worse, reference, 5)
    assert gap is not None and gap["step"] == 21
    # The newest value has the weight 1/3, and 20 steps before it the rest but (2/3)^21.
    nats = (1 / 3) / (1 - (2 / 3) ** 21)
    assert abs(gap["nats"] - nats) <= 2 * _rounding(21, 3.0) and abs(gap["relative"] - nats / 2) <= _rounding(21, 3.0)
    better = largest_gap([2.0] * 29 + [1.0], reference, 5)
    assert better is not None and better["nats"] < 0
    assert largest_gap([9.0] + [2.0] * 199, [2.0] * 200, 150)["nats"] < 0.1, "before it has averaged, nothing counts"
    assert largest_gap([float("nan")] * 9, [2.0] * 9, 5) is None


def _counts(x, quantizer, usage="row"):
    return lost(x, ops.quantize(x, quantizer, usage=usage), quantizer.max_value * (1 + 2.0**-20)).tolist()


@pytest.mark.parametrize("usage", ["row", "column", "both"])
def test_delayed_casts_lose_what_their_scale_misses(usage):
    x = torch.zeros(16, 32)
    x[0, 0], x[3, 1], x[5, 7] = 449.0, -1e4, 448.0  # beyond, beyond, at the largest
    x[1, 1], x[2, 2] = 2.0**-11, 2.0**-9  # below half of the smallest, the smallest
    assert _counts(x, DelayedQuantizer("e4m3fn", scale=torch.ones(1)), usage) == [512, 2, 1]
    assert _counts(x, DelayedQuantizer("e4m3fn", scale=torch.full((1,), 2.0**-8)), usage) == [512, 0, 2]


@pytest.mark.parametrize("usage", ["row", "column"])
@pytest.mark.parametrize("two_d", [False, True])
def test_block_scales_are_read_per_block(two_d, usage):
    x = torch.ones(144, 272)
    x[130:, 260:] = 1e-6  # small beside the ones of its own block, in one orientation or both
    x[0, 0] = 1e5
    quantizer = BlockQuantizer("e4m3fn", two_d=two_d)
    values, saturated, underflowed = _counts(x, quantizer, usage)
    decoded = ops.dequantize(ops.quantize(x, quantizer, usage=usage))
    assert (values, saturated) == (144 * 272, 0)
    assert underflowed == int((decoded == 0).sum())
    assert underflowed > 0


def test_current_casts_never_saturate():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 1e3
    assert _counts(x, CurrentQuantizer("e5m2"))[1] == 0


def test_nan_and_unknown_scales():
    x = torch.tensor([[float("nan"), float("inf"), 0.0, 1.0] * 4])
    assert _counts(x, DelayedQuantizer("e4m3fn", scale=torch.ones(1))) == [16, 4, 0]
    data, scale = torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8)
    strange = Quantized(data, None, scale, None, "e4m3fn", "mxfp8", "swizzled_32x4x4", (1, 16), x.dtype, x.device)
    with pytest.raises(ValueError, match="mxfp8 scales in the layout swizzled_32x4x4"):
        lost(x, strange, 448.0)


# -- refusals --------------------------------------------------------------------------------------------------------

REFUSED = (
    (("--seq", "100"), "--seq 100: expected a multiple of 16"),
    (("--hidden", "72"), "--hidden 72: expected a multiple of 16"),
    (("--heads", "3"), "--heads 3: expected a divisor of --hidden 64"),
    (("--steps", "0"), "--steps 0: expected at least 1"),
    (("--batch", "-1"), "--batch -1: expected at least 1"),
    (("--log-every", "0"), "--log-every 0: expected at least 1"),
    (("--lr", "0"), "--lr 0.0: expected a positive number"),
    (("--lr", "nan"), "--lr nan: expected a positive number"),
    (("--seed", "-1"), "--seed -1: expected 0 to"),
    (("--recipe", "delaid"), "--recipe delaid: expected delayed, current, block or all; did you mean 'delayed'?"),
    (("--recipe", ","), "expected delayed, current, block or all"),
    (("--size", "huge"), "--size huge: expected tiny, small, medium, large"),
    (("--device", "gpu9"), "--device gpu9: expected a PyTorch device"),
    (("--device", "cuda:99"), "--device cuda:99: "),
    (("--seq", "16000000"), "--seq 16000000: expected less than the"),
    (("--policy", "nowhere.yaml"), "nowhere.yaml: no such policy file"),
)


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_mistakes_are_refused_before_anything_is_written(te, tmp_path, arguments, message):
    folder = tmp_path / "results"
    answer = te("demo", *_ARGUMENTS, "-o", str(folder), *arguments)
    assert answer.code == 2
    assert message in answer.err and answer.out == ""
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_refused(te, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    answer = te("demo", *_ARGUMENTS, "-o", str(tmp_path / "file" / "below"), "--json")
    assert answer.code == 2 and "cannot be written to" in answer.json["error"]


def test_recipes_are_listed_repeated_or_all():
    def names(*given: str) -> tuple[str, ...]:
        return read_options({**_SHAPE, "recipe": list(given)}).recipes

    assert names("all") == ("delayed", "current", "block")
    assert names("block,all", "delayed") == ("block", "delayed", "current")
    assert names("block", "delayed") == ("block", "delayed") == names("block,delayed,block")
    assert read_options(_SHAPE).recipes == ("delayed",)


def test_sizes_give_defaults_that_arguments_override():
    tiny = read_options({"device": "cpu"})
    assert (tiny.hidden, tiny.steps) == (SIZES["tiny"].hidden, SIZES["tiny"].steps)
    mixed = read_options({"device": "cpu", "size": "large", "layers": 2})
    assert (mixed.hidden, mixed.layers) == (SIZES["large"].hidden, 2)


# -- endings ---------------------------------------------------------------------------------------------------------


def test_a_call_that_nothing_serves_leaves_an_incomplete_document(te, tmp_path):
    policy = tmp_path / "nothing.yaml"
    policy.write_text("version: 1\nrules:\n  - op: activation_fwd\n    allow: []\n")
    answer = te("demo", *_ARGUMENTS, "-o", str(tmp_path), "-p", str(policy), "--quiet", "--json")
    assert answer.code == 2 and "activation_fwd" in answer.err
    document = json.loads((tmp_path / "te_dispatch_demo.json").read_text())
    assert document["complete"] is False and "activation_fwd" in document["error"]
    assert not (tmp_path / "te_dispatch_demo.png").exists()


def test_an_unforeseen_error_leaves_an_incomplete_document_too(te, tmp_path, monkeypatch):
    step = Trainer.step

    def failing(trainer, number):
        if number == 3:
            raise RuntimeError("the driver is gone")
        return step(trainer, number)

    monkeypatch.setattr(Trainer, "step", failing)
    answer = te("demo", *_ARGUMENTS, "-o", str(tmp_path), "--quiet", "--json")
    assert answer.code == 2 and "the driver is gone" in answer.json["error"]
    document = json.loads((tmp_path / "te_dispatch_demo.json").read_text())
    assert document["complete"] is False and "the driver is gone" in document["error"]
    assert document["runs"][0]["steps_done"] == 3


def test_an_interrupt_leaves_an_incomplete_document(tmp_path):
    arguments = [*_ARGUMENTS, "--steps", "100000", "--log-every", "1", "-o", str(tmp_path)]
    child = subprocess.Popen(
        [sys.executable, "-m", "te_dispatch.cli", "demo", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"},
        # A shell starts background jobs with the signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "step     3/" in line:
            child.send_signal(signal.SIGINT)
            break
    rest = child.stderr.read()
    assert child.wait(timeout=60) == 130
    assert "interrupted" in rest and "Traceback" not in rest
    document = json.loads(Path(tmp_path, "te_dispatch_demo.json").read_text())
    assert document["complete"] is False
    (run,) = document["runs"]
    assert run["name"] == "bf16" and 3 <= run["steps_done"] < 100000 and run["validation_loss"] is None
    assert any(row["operator"] == "gemm" for row in run["calls"])
