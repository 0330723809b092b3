# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Shadow mode: calls of a running job, compared with another backend."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.common.recipe import NVFP4BlockScaling
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.memory import GuardedMemory
from te_dispatch.conformance.selection import cases_of
from te_dispatch.conformance.space import rules_for, spaces
from te_dispatch.core import scopes, shadow
from te_dispatch.core.errors import Declined, ShadowMismatch
from te_dispatch.core.manager import OpManager
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.policy import Policy, Selector, Shadow
from te_dispatch.core.results import CHECK_RESULTS
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer

from .shadowing import RECIPES, of, product, shadowing, steps, totals

pytestmark = [pytest.mark.sampled(6), pytest.mark.usefixtures("counts_from_zero", "unchecked_results")]


@pytest.fixture
def unchecked_results(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shadow mode judges results itself, and these tests ask what it binds."""
    monkeypatch.delenv(CHECK_RESULTS, raising=False)
    scopes.MANAGER.reload_environment()
    yield
    monkeypatch.undo()
    scopes.MANAGER.reload_environment()


# -- no false alarm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RECIPES, "nvfp4"])
def test_linear_is_right_and_stays_bit_for_bit_what_it_was(name: str, tmp_path: Path) -> None:
    recipe = {**RECIPES, "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)}[name]

    def train() -> list[torch.Tensor]:
        torch.manual_seed(1)
        module = te.Linear(64, 96, params_dtype=torch.bfloat16, device="cpu")
        x = torch.randn(3, 32, 64, dtype=torch.bfloat16, requires_grad=True)
        return [*steps(module, x, recipe), torch.rand(4)]  # the last: the generator is where it was

    plain = train()
    with te_dispatch.policy(shadowing(tmp_path)):
        watched = train()
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    found = totals()
    assert found["compared"] >= 6 and found["mismatched"] == 0
    assert of("quantize_dbias").compared == 2 if name == "delayed" else True
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformer_layer_raises_no_false_alarm(name: str, dropout: float, tmp_path: Path) -> None:
    torch.manual_seed(2)
    layer = te.TransformerLayer(
        64, 128, 4, params_dtype=torch.bfloat16, device="cpu", hidden_dropout=dropout, attention_dropout=dropout
    )
    x = torch.randn(32, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    with te_dispatch.policy(shadowing(tmp_path)):
        steps(layer, x, RECIPES[name])
    found = totals()
    assert found["compared"] > 20 and found["mismatched"] == 0
    judged = {one.operator for one in te_dispatch.shadow_report() if one.compared}
    assert {"gemm", "layernorm_fwd", "layernorm_bwd", "activation_bwd"} <= judged
    reasons = {reason for one in te_dispatch.shadow_report() for reason in one.not_comparable}
    assert all("dropout is on" in reason or "no rules for this operator" in reason for reason in reasons), reasons
    for operator in ("attention_fwd", "attention_bwd"):
        one = of(operator)
        assert (one.compared, sum(one.not_comparable.values())) == ((0, 2) if dropout else (2, 0))


def test_residual_norm_is_judged_by_the_space_that_serves_it(tmp_path: Path) -> None:
    x, residual = torch.randn(16, 64, dtype=torch.bfloat16), torch.randn(16, 64, dtype=torch.bfloat16)
    with te_dispatch.policy(shadowing(tmp_path)):
        ops.rmsnorm_fwd(x, torch.ones(64, dtype=torch.bfloat16), residual=residual)
    assert of("rmsnorm_fwd").compared == 1


def test_rules_read_arguments_only() -> None:
    """Every operator with a space has one whose rules judge a call of it that is no case."""
    for operator in {space.operator for space in spaces()}:
        space = next(s for s in spaces(operator) if not s.sampled and s.raises is None)
        case = cases_of(space, "smoke")[0]
        arguments = space.make(case.values, Maker(case, scopes.MANAGER))
        assert rules_for(operator, arguments) is not None, operator


def test_a_composite_is_compared_piece_by_piece(tmp_path: Path) -> None:
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    policy = shadowing(tmp_path)
    with te_dispatch.policy(dataclasses.replace(policy, prefer=(Selector("composite"), *policy.prefer))):
        ops.quantize_dbias(x, CurrentQuantizer(), usage="both")
    assert {one.implementation.partition(".")[0] for one in te_dispatch.shadow_report()} == {"torch"}
    assert "quantize" in {one.operator for one in te_dispatch.shadow_report()}
    assert totals()["mismatched"] == 0


# -- mismatches --------------------------------------------------------------------------------------------------------


def test_raise_names_everything(wrong: None, tmp_path: Path) -> None:
    a, b = product()
    with te_dispatch.policy(shadowing(tmp_path, prefer="wrong")), pytest.raises(ShadowMismatch) as raised:
        ops.gemm(a, b, layout="NT")
    error = raised.value
    assert (error.operator, error.implementation, error.other) == ("gemm", "wrong.matmul", "reference")
    assert error.finding.startswith("out[0, 3] is ") and "(1 of 128 elements are wrong)" in error.finding
    assert error.file is not None and Path(error.file).parent == tmp_path
    for part in (error.operator, error.implementation, error.other, error.finding, f"--replay {error.file}"):
        assert part in str(error)
    assert (of("gemm").mismatched, of("gemm").files) == (1, [error.file])


def test_warn_says_it_once_and_goes_on(wrong: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = product()
    with te_dispatch.policy(shadowing(tmp_path, "warn", "wrong", limit=2)), caplog.at_level(logging.WARNING):
        outs = [ops.gemm(a, b, layout="NT").out for _ in range(3)]
        ops.gemm(*product(48), layout="NT")
    said = [record.getMessage() for record in caplog.records if "shadow" in record.getMessage()]
    assert len(said) == 1 and "gemm on wrong.matmul differs from reference" in said[0]
    assert (of("gemm").sampled, of("gemm").compared, of("gemm").mismatched) == (4, 1, 3)
    assert sorted(of("gemm").files) == sorted(map(str, tmp_path.iterdir())) and len(of("gemm").files) == 2
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_backward_on_another_thread_runs_under_its_forwards_policy(wrong: None, tmp_path: Path) -> None:
    norm = te.RMSNorm(32, device="cpu")
    x = torch.randn(8, 32, requires_grad=True)
    with te_dispatch.policy(shadowing(tmp_path, prefer="wrong")):
        y = norm(x)
    raised: list[BaseException] = []

    def backward() -> None:
        try:
            y.sum().backward()
        except ShadowMismatch as error:
            raised.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert len(raised) == 1 and "rmsnorm_bwd on wrong.rmsnorm_bwd" in str(raised[0]) and "dgamma" in str(raised[0])


def test_a_result_of_another_form_is_a_mismatch(wrong: None, tmp_path: Path) -> None:
    with te_dispatch.policy(shadowing(tmp_path, prefer="wrong")), pytest.raises(ShadowMismatch, match="shape function"):
        ops.activation_fwd(torch.randn(4, 8), kind="gelu")


def test_what_declines_is_not_compared_but_what_serves_the_call_is(wrong: None, tmp_path: Path) -> None:
    with te_dispatch.policy(shadowing(tmp_path, prefer="wrong")):
        for _ in range(3):
            ops.softmax_fwd(torch.randn(4, 8))
    assert (of("softmax_fwd").implementation, of("softmax_fwd").compared) == ("torch.softmax_fwd", 3)


def test_an_error_of_the_job_stays_its_own(tmp_path: Path) -> None:
    a, b = product()
    with te_dispatch.policy(shadowing(tmp_path)):
        ops.gemm(a, b, layout="NT")
        with pytest.raises((RuntimeError, ValueError)):
            ops.gemm(a, b, layout="NN")
    assert totals()["mismatched"] == 0


def test_an_unwritable_directory_hides_no_mismatch(wrong: None, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with (
        te_dispatch.policy(shadowing(taken, prefer="wrong")),
        pytest.raises(ShadowMismatch, match="could not be written"),
    ):
        ops.gemm(*product(), layout="NT")
    nothing = shadowing(tmp_path, prefer="wrong", limit=0)
    with te_dispatch.policy(nothing), pytest.raises(ShadowMismatch, match="limit of 0 files") as raised:
        ops.gemm(*product(), layout="NT")
    assert raised.value.file is None


def test_the_default_directory_is_the_users_own(wrong: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    policy = dataclasses.replace(shadowing(tmp_path, prefer="wrong"), name="default directory")
    policy = dataclasses.replace(policy, shadow=Shadow("reference", 1.0, "raise"))
    with te_dispatch.policy(policy), pytest.raises(ShadowMismatch) as raised:
        ops.gemm(*product(), layout="NT")
    folder = Path(str(raised.value.file)).parent
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="users of POSIX")
def test_a_link_in_the_place_of_the_default_directory_is_refused(
    wrong: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may have put it there, to have files written into a folder of this user."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / f"te_dispatch_shadow_{os.getuid()}").symlink_to(mine)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    policy = dataclasses.replace(shadowing(tmp_path, prefer="wrong"), name="link")
    policy = dataclasses.replace(policy, shadow=Shadow("reference", 1.0, "raise"))
    with te_dispatch.policy(policy), pytest.raises(ShadowMismatch, match="is a link or belongs to another user"):
        ops.gemm(*product(), layout="NT")
    assert list(mine.iterdir()) == []


# -- what is sampled ---------------------------------------------------------------------------------------------------


def test_only_the_named_operators(tmp_path: Path) -> None:
    with te_dispatch.policy(shadowing(tmp_path, ops=("gemm", "softmax*"))):
        ops.gemm(*product(), layout="NT")
        ops.softmax_fwd(torch.randn(4, 8))
        ops.activation_fwd(torch.randn(4, 8), kind="gelu")
    assert {one.operator for one in te_dispatch.shadow_report()} == {"gemm", "softmax_fwd"}


def test_off_in_a_stronger_layer_and_no_shadow_outside(tmp_path: Path) -> None:
    with te_dispatch.policy(shadowing(tmp_path)), te_dispatch.policy(Policy(name="off", shadow=Shadow(""))):
        ops.gemm(*product(), layout="NT")
    ops.gemm(*product(), layout="NT")
    assert te_dispatch.shadow_report() == []


def test_nothing_is_bound_differently_without_a_shadow(tmp_path: Path) -> None:
    dispatcher = scopes.MANAGER.bindings.dispatcher(OPERATORS["gemm"])
    ops.gemm(*product(), layout="NT")
    bound = scopes.MANAGER.functions.bound(OPERATORS["gemm"], "torch.matmul")
    assert any(entry.bound is bound for entry in dispatcher.entries.values())
    with te_dispatch.policy(shadowing(tmp_path, against="torch")):  # the backend itself
        ops.gemm(*product(), layout="NT")
        inside = scopes.capture().dispatcher(OPERATORS["gemm"])
    assert [entry.bound for entry in inside.entries.values()] == [bound]


def test_a_process_wide_policy(tmp_path: Path) -> None:
    te_dispatch.set_policy(shadowing(tmp_path))
    try:
        ops.gemm(*product(), layout="NT")
    finally:
        te_dispatch.set_policy(None)
    ops.gemm(*product(), layout="NT")
    assert of("gemm").compared == 1


def test_the_fraction_is_kept(tmp_path: Path) -> None:
    """Of 4000 calls at 1/20, 200 +- 14 are sampled; 7 deviations are no accident."""
    shadows = scopes.MANAGER.shadows
    draws = [shadows.countdown(0.05) for _ in range(20000)]
    assert min(draws) == 1 and abs(sum(draws) / len(draws) - 20) < 7 * math.sqrt(0.95) * 20 / math.sqrt(len(draws))
    assert abs(draws.count(1) / len(draws) - 0.05) < 7 * math.sqrt(0.05 * 0.95 / len(draws))
    assert shadows.countdown(1.0) == 1 and shadows.countdown(1e-300) >= 1
    x = torch.randn(2, 4)
    with te_dispatch.policy(shadowing(tmp_path, fraction=0.05)):
        for _ in range(4000):
            ops.softmax_fwd(x)
    assert abs(of("softmax_fwd").sampled - 200) < 7 * 14


def test_several_threads(tmp_path: Path) -> None:
    policy = shadowing(tmp_path, "raise")
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with te_dispatch.policy(policy):
                for _ in range(5):
                    ops.gemm(*product(), layout="NT")
                    ops.quantize(torch.randn(32, 32), CurrentQuantizer(), usage="both")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and of("gemm").mismatched == of("quantize").mismatched == 0
    # Threads that count down at once may lose a step, which at fraction 1 costs no sample.
    assert of("gemm").sampled == of("quantize").sampled == 20


def test_tasks_follow_their_scopes(tmp_path: Path) -> None:
    async def inside() -> None:
        with te_dispatch.policy(shadowing(tmp_path)):
            await asyncio.sleep(0)
            ops.gemm(*product(), layout="NT")

    async def both() -> None:
        await asyncio.gather(inside(), asyncio.to_thread(lambda: ops.gemm(*product(), layout="NT")))

    try:
        asyncio.run(both())
    finally:
        scopes.MANAGER.mirror.shared = False  # or graphs are not compiled in this thread any more
    assert of("gemm").sampled == 1


def test_meta_tensors_and_traced_calls_are_left_alone(tmp_path: Path) -> None:
    a, b = product()
    with te_dispatch.policy(shadowing(tmp_path)):
        assert ops.gemm(a.to("meta"), b.to("meta"), layout="NT").out.device.type == "meta"
        eager = ops.gemm(a, b, layout="NT").out
        assert of("gemm").sampled == 1
        assert ops.gemm(a.to("meta"), b.to("meta"), layout="NT").out.device.type == "meta"
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as fakes:
            made = ops.gemm(fakes.from_tensor(a), fakes.from_tensor(b), layout="NT").out
        assert made.shape == eager.shape
        compiled = torch.compile(lambda a, b: ops.gemm(a, b, layout="NT").out, fullgraph=True, backend="eager")
        assert torch.equal(compiled(a, b), eager)
    assert of("gemm").sampled == 1 and of("gemm").compared == 1


def test_capture_is_not_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = product()
    with te_dispatch.policy(shadowing(tmp_path)):
        ops.gemm(a, b, layout="NT")
        monkeypatch.setattr(shadow, "is_capturing", lambda: True)
        ops.gemm(a, b, layout="NT")
    assert of("gemm").not_comparable == {"made during CUDA graph capture": 1} and of("gemm").compared == 1


def test_a_sampled_call_is_not_sampled_in_turn(wrong: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import te_dispatch_wrong  # type: ignore[import-not-found]

    def calls_dispatch(sound: Any, args: Any, kwargs: Any) -> Any:
        ops.softmax_bwd(torch.ones(2, 4), torch.ones(2, 4))
        return sound(*args, **kwargs)

    monkeypatch.setitem(te_dispatch_wrong.SOUND, "gemm", ("gemm", calls_dispatch))
    monkeypatch.setattr(scopes.MANAGER.functions, "_bound", {})
    with te_dispatch.policy(shadowing(tmp_path, prefer="wrong")):
        ops.gemm(*product(), layout="NT")
        assert [one.operator for one in te_dispatch.shadow_report()] == ["gemm"]
        ops.softmax_bwd(torch.ones(2, 4), torch.ones(2, 4))
    assert of("softmax_bwd").sampled == 1


def test_inference_mode_autocast_and_another_default_device(tmp_path: Path) -> None:
    a, b = product()
    with te_dispatch.policy(shadowing(tmp_path)):
        with torch.inference_mode():
            ops.gemm(a.clone(), b.clone(), layout="NT")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            te.Linear(32, 16, params_dtype=torch.float32, device="cpu")(a)
        with torch.device("meta"):
            ops.gemm(a, b, layout="NT")
    assert totals() == Counter(sampled=3, compared=3, mismatched=0, not_comparable=0)


def test_what_is_written_is_judged_from_what_it_was_before(tmp_path: Path) -> None:
    a, b = product()
    out = torch.ones(8, 16)
    quantizer = DelayedQuantizer(scale=torch.ones(1), amax=torch.full((1,), 0.5))
    with te_dispatch.policy(shadowing(tmp_path)):
        ops.gemm(a, b, layout="NT", out=out, accumulate=True)
        ops.quantize(a, quantizer, usage="row")
    assert torch.allclose(out, 1 + a @ b.T, atol=1e-4) and quantizer.amax.item() == a.abs().max().item()
    assert totals()["compared"] == 2


def test_what_cannot_be_compared_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from te_dispatch.conformance import comparing

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("in the kit")

    a, b = product()
    with te_dispatch.policy(shadowing(tmp_path)):
        monkeypatch.setattr(comparing.Comparison, "finding", broken)
        ops.gemm(a, b, layout="NT")
    assert of("gemm").not_comparable == {"ZeroDivisionError: in the kit": 1}


def test_a_missing_kit_or_backend_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = product()
    monkeypatch.setitem(sys.modules, "te_dispatch.conformance.comparing", None)
    monkeypatch.delattr("te_dispatch.conformance.comparing", raising=False)
    with caplog.at_level(logging.WARNING):
        with te_dispatch.policy(shadowing(tmp_path)):
            for _ in range(3):
                ops.gemm(a, b, layout="NT")
                ops.softmax_fwd(a)
        with te_dispatch.policy(shadowing(tmp_path, against="nimbus")):
            ops.gemm(a, b, layout="NT")
            ops.softmax_fwd(a)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("shadow")]
    assert len(said) == 2, said
    assert "pip install 'te-dispatch[conformance]'" in said[0] and "'nimbus' is not installed" in said[1]
    assert te_dispatch.shadow_report() == []


def test_managers_count_for_themselves() -> None:
    own = OpManager(environ={}, label="own")
    own.set_policy(Policy(name="own", shadow=Shadow("reference", 1.0)))
    own.ops.softmax_fwd(torch.randn(2, 4))
    assert te_dispatch.shadow_report() == [] and [one.sampled for one in scopes.shadow_report(own)] == [1]


def test_declined_is_no_mismatch() -> None:
    """`Declined` passes through a sampler untouched, or dispatch would not go on to the next candidate."""

    def declining(*args: Any) -> None:
        raise Declined("no")

    shadows = scopes.MANAGER.shadows
    sampled = shadows.sampler(OPERATORS["softmax_fwd"], "other.k", declining, Shadow("reference", 1.0), "")
    with pytest.raises(Declined):
        sampled(torch.ones(2, 4), None, False, 1.0, None)
    assert te_dispatch.shadow_report() == []


def test_memory_meant_for_a_graphs_results_goes_to_no_comparison(tmp_path: Path) -> None:
    """What falls back inside a compiled graph is bound like any other call."""
    with te_dispatch.policy(shadowing(tmp_path)), GuardedMemory(0):
        ops.softmax_fwd(torch.randn(2, 4))
    assert of("softmax_fwd").not_comparable == {"made while a compiled graph runs": 1}
