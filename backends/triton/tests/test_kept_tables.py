# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tables that stay in device memory hold the tensors of each call, whatever became of those of earlier ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from te_dispatch.ops import alloc

kept_tables = pytest.importorskip("te_dispatch_triton.kept_tables")

from te_dispatch_triton import launch, scales, training, training_tables  # noqa: E402

SIZES = (5, 0, 33, 70, 16)
Lists = list[list[torch.Tensor]]
pytestmark = pytest.mark.interpreted


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """On the host, which has one stream, of a number that a test may change."""
    current = [7]
    monkeypatch.setattr(kept_tables, "_LEAST", -1)
    monkeypatch.setattr(kept_tables, "_capturing", lambda: False)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: current[0])
    for tables in (training._ADAM, training._NORMS, training._SCALES, training._SCALES_IN_PLACE):
        monkeypatch.setattr(tables, "_kinds", kept_tables.BoundedDict(kept_tables._KINDS))
    scales._update_there.plans.clear()
    yield current
    alloc.set_allocator(None)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many words each launch that wrote a table wrote."""
    counts: list[int] = []
    write = training_tables._write

    def note(device: Any, grid: Any, args: Any, constants: Any, config: Any) -> None:
        counts.append(args[1][0] & 0xFFFF)
        write(device, grid, args, constants, config)

    monkeypatch.setattr(training_tables, "_write", note)
    return counts


def made(count: int = 4) -> Lists:
    return [[torch.rand(size) for size in SIZES] for _ in range(count)]


def step(lists: Lists, **more: Any) -> None:
    training.multi_tensor_adam(*lists, **{"lr": 0.1, "step": 2, **more})


def equals_a_step_without_tables(lists: Lists, monkeypatch: pytest.MonkeyPatch, **more: Any) -> bool:
    """Make a step, and the same on copies for which nothing is kept."""
    copies = [[x.clone() for x in tensors] for tensors in lists]
    step(lists, **more)
    with monkeypatch.context() as patched:
        patched.setattr(kept_tables, "_LEAST", 0)
        step(copies, **more)
    return all(torch.equal(x, y) for left, right in zip(lists, copies) for x, y in zip(left, right))


def test_a_table_is_written_once_and_then_what_moved(written: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    lists = made()
    step(lists)
    assert written == [4 * 8]  # one tensor is empty
    for lr in (0.1, 0.2, 0.3):
        assert equals_a_step_without_tables(lists, monkeypatch, lr=lr)
    written.clear()
    step(lists)
    assert written == []
    for _ in range(kept_tables._SETS - 1):
        lists[1] = made(1)[0]
        step(lists)
    seen = [lists[1]]
    written.clear()
    for _ in range(kept_tables._SETS + 1):
        lists[1] = made(1)[0]
        seen.append(lists[1])
        step(lists)
    assert written == [4] * (kept_tables._SETS + 1)  # the gradients' addresses alone
    lists[1] = seen[-2]
    written.clear()
    assert equals_a_step_without_tables(lists, monkeypatch)
    assert written == [32]  # that of the copies


def swapped(lists: Lists) -> None:
    lists[0][2].data = torch.rand(33)


def shortened(lists: Lists) -> None:
    for tensors in lists:
        tensors[2].data = tensors[2].data[:11]  # at the same address


def resized(lists: Lists) -> None:
    for tensors in lists:
        tensors[3].resize_(200).fill_(1.0)


def emptied(lists: Lists) -> None:
    for tensors in lists:
        tensors[0].resize_(0)


def filled(lists: Lists) -> None:
    for tensors in lists:
        tensors[1].resize_(9).fill_(1.0)


def misaligned(lists: Lists) -> None:
    lists[3][4].data = torch.rand(17)[1:]


def strided(lists: Lists) -> None:
    lists[1][2].data = torch.rand(66)[::2]


def narrowed(lists: Lists) -> None:
    lists[1] = [x.bfloat16() for x in lists[1]]


def at_the_addresses_of_others(lists: Lists) -> None:
    lists[0] = [x.view(-1, 1).view(-1) for x in lists[0]]


def exchanged(lists: Lists) -> None:
    lists[2], lists[3] = lists[3], lists[2]


@pytest.mark.parametrize(
    "change",
    [
        swapped,
        shortened,
        resized,
        emptied,
        filled,
        misaligned,
        strided,
        narrowed,
        at_the_addresses_of_others,
        exchanged,
    ],
)
def test_tensors_that_changed_are_told(change: Callable[[Lists], None], monkeypatch: pytest.MonkeyPatch) -> None:
    lists = made()
    for _ in range(2):
        step(lists)
    for _ in range(kept_tables._SETS):  # so that a table is written over
        lists[1] = made(1)[0]
        step(lists)
    change(lists)
    for _ in range(2):
        assert equals_a_step_without_tables(lists, monkeypatch)


def test_a_master_is_a_list_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = made()
    for master in (None, made(1)[0], None, made(1)[0], tuple(made(1)[0])):
        copies = [[x.clone() for x in tensors] for tensors in (*lists, master or ())]
        step(lists, master=master)
        with monkeypatch.context() as patched:
            patched.setattr(kept_tables, "_LEAST", 0)
            step(copies[:4], master=master and copies[4])
        for tensors, others in zip((*lists, master or ()), copies):
            assert all(map(torch.equal, tensors, others))


def test_every_stream_and_thread_writes_its_own(stream: list[int], written: list[int]) -> None:
    lists = made()
    step(lists)
    stream[0] = 8
    step(lists)
    assert written == [32, 32]
    thread = threading.Thread(target=step, args=(lists,))
    thread.start()
    thread.join()
    stream[0] = 7
    step(lists)
    assert written == [32, 32, 32]


@pytest.mark.parametrize("when", ["captured", "recorded", "allocated elsewhere"])
def test_nothing_is_kept_or_taken_while(when: str, monkeypatch: pytest.MonkeyPatch, written: list[int]) -> None:
    lists, asked = made(), []
    step(lists)

    def asking(role: str, shape: Any, dtype: Any, device: Any) -> torch.Tensor:
        asked.append(role)
        return torch.empty(shape, dtype=dtype, device=device)

    launches: list[launch.Launch] = []
    if when == "captured":
        monkeypatch.setattr(kept_tables, "_capturing", lambda: True)
    elif when == "allocated elsewhere":
        alloc.set_allocator(asking)
    if when == "recorded":
        with launch.recording(launches):
            step(lists)
        assert [x.kernel.name for x in launches] == ["write_words", "adam"]
    else:
        step(lists)
        assert asked == (["workspace"] if when == "allocated elsewhere" else [])
    assert len(written) == 2
    assert len(next(iter(training._ADAM._kinds.values()))) == 1


def test_what_is_used_again_is_not_written_over(written: list[int]) -> None:
    lists, others = made(), made()
    step(lists)
    for _ in range(2 * kept_tables._SETS):
        others[1] = made(1)[0]
        step(others)
        written.clear()
        step(lists)
        assert written == []


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"lr": "0.1"}, "lr: "), ({"step": 0}, "step: "), ({"beta2": 1.0}, "beta2: "), ({"eps": -1.0}, "eps: "),
        ({"noop_flag": torch.zeros(2)}, "noop_flag: "), ({"master": []}, "master: "), ({"params": []}, "params: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_of_known_lists_too(more: dict[str, Any], error: str) -> None:
    lists = made()
    for _ in range(3):
        step(lists)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    with pytest.raises((TypeError, ValueError), match=error):
        training.multi_tensor_adam(**{**dict(zip(names, lists)), "lr": 0.1, **more})
    with pytest.raises(TypeError, match="params: "):
        training.multi_tensor_adam(iter(lists[0]), *lists[1:], lr=0.1)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_norms_and_products_of_known_lists(per_tensor: bool, written: list[int]) -> None:
    for _ in range(3):
        (tensors,) = made(1)
        for _ in range(2):
            expected = torch.stack([x.norm() for x in tensors]) if per_tensor else torch.cat(tensors).norm().view(1)
            torch.testing.assert_close(training.multi_tensor_l2norm(tensors, per_tensor=per_tensor), expected)
            outputs = [torch.empty_like(x, dtype=torch.bfloat16) for x in tensors]
            training.multi_tensor_scale(tensors, outputs, 3.0)
            assert all(torch.equal(y, (x * 3.0).bfloat16()) for x, y in zip(tensors, outputs))
    tensors[0][0] = float("nan")
    flag = torch.zeros(1)
    training.multi_tensor_scale(tensors, outputs, 3.0, noop_flag=flag)
    written.clear()
    training.multi_tensor_scale(tensors, outputs, 2.0, noop_flag=flag)
    training.multi_tensor_l2norm(tensors, per_tensor=per_tensor)
    assert flag == 1.0 and written == []


@pytest.mark.parametrize("again", [lambda tensors: tensors, tuple], ids=["one list", "two lists"])
@pytest.mark.parametrize("stride", [1, 2])
def test_products_in_place(again: Callable[[Any], Any], stride: int, written: list[int]) -> None:
    tensors = [x[::stride] for x in made(1)[0]]
    for _ in range(3):
        written.clear()
        expected = [x * 3.0 for x in tensors]
        training.multi_tensor_scale(tensors, again(tensors), 3.0)
        assert all(map(torch.equal, tensors, expected))
    assert bool(written) is (stride == 2)
    outputs = [torch.empty_like(x) for x in tensors]
    training.multi_tensor_scale(tensors, outputs, 2.0)
    assert all(torch.equal(y, x * 2.0) for x, y in zip(tensors, outputs))
    with pytest.raises(TypeError, match="outputs: "):
        training.multi_tensor_scale(tensors, None, 2.0)  # type: ignore[arg-type]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = training._NORMS._kinds
    kinds.clear()
    monkeypatch.setattr(kinds, "capacity", 3)
    for count in range(1, 9):
        for _ in range(7):
            tensors = [torch.rand(3) for _ in range(count)]
            training.multi_tensor_l2norm(tensors)
    assert len(kinds) <= 3
    assert all(len(known._sets) <= kept_tables._SETS for alike in kinds.values() for known in alike)


def histories(count: int) -> dict[str, Any]:
    return {
        "histories": [torch.rand(6, 3) for _ in range(count)], "scales": [torch.ones(3) for _ in range(count)],
        "max_values": [[448.0, 448.0, 57344.0] for _ in range(count)],
        "amaxes": [torch.zeros(3) for _ in range(count)],
    }  # fmt: skip


def test_many_histories_are_updated_from_a_table(written: list[int], stream: list[int]) -> None:
    portable = pytest.importorskip("te_dispatch_torch.state")
    given = histories(scales._FEW + 7)
    repeated = scales.plan_update((), **given, algorithm="max", margin=0)

    def updated(call: Callable[[], None]) -> bool:
        copies = {name: [x.clone() for x in xs] if name != "max_values" else xs for name, xs in given.items()}
        call()
        portable.update_delayed_scales(**copies)
        for name in ("histories", "scales", "amaxes"):
            assert all(map(torch.equal, given[name], copies[name])), name
        given["histories"][3][0] = 5.0  # a cast happened
        return bool(written)

    again = lambda: scales.update_delayed_scales(**given)  # noqa: E731
    assert updated(again) and updated(repeated)
    written.clear()
    assert not updated(again) and not updated(repeated)
    given["max_values"][2][1] = 240.0
    assert updated(again)
    written.clear()
    assert not updated(again)
    given["scales"][4].data = torch.ones(3)
    assert updated(again) and updated(repeated)
    stream[0] = 8
    written.clear()
    assert updated(again) and updated(repeated)


@pytest.mark.parametrize("count", [1, 2])
def test_a_planned_update_of_few_histories_is_the_operators(count: int) -> None:
    portable = pytest.importorskip("te_dispatch_torch.state")
    given = histories(count)
    repeated = scales.plan_update((), **given, algorithm="max", margin=0)
    for moved in (False, False, True):
        if moved:
            given["histories"][0].data = given["histories"][0].clone()
        copies = {name: [x.clone() for x in xs] if name != "max_values" else xs for name, xs in given.items()}
        repeated()
        portable.update_delayed_scales(**copies)
        for name in ("histories", "scales", "amaxes"):
            assert all(map(torch.equal, given[name], copies[name])), name
        given["amaxes"][0][:] = 3.0
    assert scales.plan_update(("scales",), **given, algorithm="max", margin=0) is None
    given["histories"][0] = torch.rand(3, 6).t()
    assert scales.plan_update((), **given, algorithm="max", margin=0) is None


@pytest.mark.parametrize("count", [1, 5])
def test_histories_without_columns_launch_nothing(count: int) -> None:
    launches: list[launch.Launch] = []
    given = [torch.empty(4, 0) for _ in range(count)], [torch.empty(0) for _ in range(count)], [[]] * count
    with launch.recording(launches):
        scales.update_delayed_scales(*given)
    for _ in range(2):
        scales.update_delayed_scales(*given)
    assert launches == []
