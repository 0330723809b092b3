# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A call like one before does what the host function would have done, and nothing of one call is left in another."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
launch = pytest.importorskip("te_dispatch_triton.launch")
knobs = pytest.importorskip("triton.knobs")

from te_dispatch.core.bind import _twin  # noqa: E402
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized  # noqa: E402
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer  # noqa: E402
from te_dispatch.ops import alloc  # noqa: E402
from te_dispatch.ops.checks import guards  # noqa: E402
from te_dispatch_triton import argument_facts, prepared, probe  # noqa: E402
from te_dispatch_triton.argument_facts import NUMBER, OPERAND, OPERANDS, QUANTIZER, TENSOR, UNREAD  # noqa: E402
from te_dispatch_triton.memory import address, dense, empty  # noqa: E402

LOOKED: list[str] = []
NOTED: list[Any] = []


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prepared, "_LEAST", -1)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_current", lambda: -1)
    LOOKED.clear()
    NOTED.clear()
    yield
    alloc.set_allocator(None)


def launched(*args: Any) -> None:
    """What `Kernel` does with a compiled kernel."""
    run = lambda *given: NOTED.append(given)  # noqa: E731
    launch._note((run, ("metadata",)), (3, 2, 1), args, ("BLOCK",))
    given = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args]
    run(3, 2, 1, 7, "metadata", *given, "BLOCK")


def planted(**kinds: Any) -> Any:
    """An operator that allocates, launches and says whenever its host function ran."""

    @prepared.prepared(None, **{"x": TENSOR, "scale": NUMBER, **kinds})
    def operator(x: Any, y: Any = None, *, option: Any = "a", scale: float = 1.0) -> Any:
        LOOKED.append("looked")
        out = empty("out", tuple(x.shape), x.dtype, x.device)
        launched(x, out, float(scale), option, x.shape[0], None)
        return out

    return operator


def times(operator: Any, *calls: Any) -> int:
    """How often the host function ran for calls given as arguments or (arguments, options)."""
    LOOKED.clear()
    for call in calls:
        operator(*call[:-1], **call[-1])
    return len(LOOKED)


def matrix(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.empty(shape or (4, 8), dtype=dtype)


def test_the_third_call_of_a_kind_is_prepared_and_takes_its_own_tensors() -> None:
    operator = planted()
    x, y, z = matrix(), matrix(), matrix()
    assert times(operator, (x, {}), (y, {}), (z, {}), (x, {})) == prepared.AFTER + 1
    alloc_order = [noted[5:7] for noted in NOTED]
    assert [first for first, _ in alloc_order] == [t.data_ptr() for t in (x, y, z, x)]
    NOTED.clear()
    out = operator(z)
    assert list(NOTED) == [(3, 2, 1, 7, "metadata", z.data_ptr(), out.data_ptr(), 1.0, "a", 4, None, "BLOCK")]
    assert (out.shape, out.dtype) == (z.shape, z.dtype)


@pytest.mark.parametrize(
    "other",
    [
        (matrix(8, 4), {}), (matrix(dtype=torch.bfloat16), {}), (matrix(4, 16)[:, :8], {}), (matrix(8, 4).t(), {}),
        (matrix(), {"option": "b"}), (matrix(), {"scale": 2.0}), (matrix(), {"scale": 1}), (matrix(), {"scale": True}),
        (matrix(), None, {"option": None}), (torch.empty(33)[1:].view(4, 8), {}),
        (matrix().as_subclass(type("Other", (torch.Tensor,), {})), {}),
    ],
)  # fmt: skip
def test_whatever_differs_is_another_kind(other: Any) -> None:
    operator = planted()
    assert times(operator, *[(matrix(), {})] * 3) == 2
    assert times(operator, other) == 1
    assert times(operator, (matrix(), {})) == 0


def test_zeros_of_either_sign_are_two_kinds() -> None:
    operator = planted()
    assert times(operator, *[(matrix(), {"scale": 0.0})] * 3) == 2
    NOTED.clear()
    assert times(operator, (matrix(), {"scale": -0.0}), (matrix(), {"scale": -0.0})) == 2
    operator(matrix(), scale=-0.0)
    assert [str(noted[7]) for noted in NOTED] == ["-0.0"] * 3


def test_signature_and_twin_are_those_of_the_function() -> None:
    operator = planted()
    assert inspect.signature(operator) == inspect.signature(operator.__wrapped__)
    assert "def operator(x, y, *, option, scale)" in inspect.getsource(operator.__code__)
    twin = _twin(operator)
    for _ in range(3):
        twin(matrix(), None, "a", 1.0)
    assert len(LOOKED) == 2


def test_what_pytorch_computes_is_never_prepared() -> None:
    @prepared.prepared(None, x=TENSOR)
    def operator(x: Any) -> Any:
        LOOKED.append("looked")
        launched(dense(x))
        return None

    assert times(operator, *[(matrix(8, 4).t(), {})] * 4) == 4
    assert times(operator, *[(matrix(), {})] * 4) == 2


def test_addresses_in_numbers_are_followed_or_refused() -> None:
    @prepared.prepared(None, xs=OPERANDS, told=UNREAD)
    def operator(xs: Any, *, told: Any) -> None:
        LOOKED.append("looked")
        launched(tuple(word for x in xs for word in ((told(x) + 4) | 1 << 62, 2 * told(x) + 1, x.shape[0])))

    first, second = [matrix(), matrix()], [matrix(), matrix()]
    assert times(operator, (first, {"told": address}), (first, {"told": address})) == 2
    NOTED.clear()
    assert times(operator, (second, {"told": address})) == 0
    expected = tuple(n for x in second for n in ((x.data_ptr() + 4) | 1 << 62, 2 * x.data_ptr() + 1, 4))
    assert list(NOTED) == [(3, 2, 1, 7, "metadata", expected, "BLOCK")]

    @prepared.prepared(None, x=TENSOR)
    def careless(x: Any) -> None:
        LOOKED.append("looked")
        launched((x.data_ptr(),))

    assert times(careless, *[(matrix(), {})] * 4) == 4


def test_addresses_of_parts_are_multiplied_whole_and_empty_parts_have_none() -> None:
    @prepared.prepared(None, x=TENSOR)
    def operator(x: Any) -> None:
        LOOKED.append("looked")
        launched(tuple(address(part) * 16 + 5 for part in x.split_with_sizes((1, 0, 3))))

    assert times(operator, *[(matrix(), {})] * 2) == 2
    NOTED.clear()
    x = matrix()
    assert times(operator, (x, {})) == 0
    expected = x.data_ptr() * 16 + 5, 5, x[1:].data_ptr() * 16 + 5
    assert list(NOTED) == [(3, 2, 1, 7, "metadata", expected, "BLOCK")]


def test_an_address_that_moves_along_hundreds_of_parts_is_followed() -> None:
    @prepared.prepared(None, x=TENSOR)
    def operator(x: Any) -> None:
        LOOKED.append("looked")
        words, at = [], address(x)
        for step in range(400):
            words.append(at | 1 << 62 | 1 << 61)
            at += step
        launched(tuple(words))

    assert times(operator, *[(matrix(), {})] * 2) == 2
    NOTED.clear()
    x = matrix()
    assert times(operator, (x, {})) == 0
    told = NOTED[0][5]
    assert told == tuple(x.data_ptr() + sum(range(n)) | 3 << 61 for n in range(400))


def test_one_tensor_in_two_places_says_nothing_of_two() -> None:
    operator = planted(y=TENSOR)
    x, y = matrix(), matrix()
    assert times(operator, *[(x, x, {})] * 4) == 4
    prepared.forget()
    assert times(operator, *[(x, y, {})] * 4) == 2


def test_records_quantizers_and_what_comes_back() -> None:
    @prepared.prepared(None, x=OPERAND, quantizer=QUANTIZER)
    def operator(x: Any, quantizer: Any) -> Any:
        LOOKED.append("looked")
        whole = empty("dq", (2, *x.shape), torch.float32, x.device)
        launched(x.row_data, x.row_scale_inv, getattr(quantizer, "scale", None), whole)
        return x, x.row_data, whole.unbind(0), [whole, None]

    def record(shared: bool = True, encoding: str = "e4m3fn") -> Quantized:
        scale = torch.empty(1)
        codes = torch.empty(4, 8, dtype=torch.uint8), torch.empty(8, 4, dtype=torch.uint8)
        other = scale if shared else torch.empty(1)
        return Quantized(
            *codes, scale, other, encoding, "tensor", CANONICAL_SCALES, (4, 8), torch.bfloat16, codes[0].device
        )

    delayed = lambda amax=None: DelayedQuantizer(scale=torch.empty(1), amax=amax)  # noqa: E731
    assert times(operator, *[(record(), delayed(), {})] * 2) == 2
    x, quantizer = record(), delayed()
    NOTED.clear()
    same, codes, (first, second), (whole, nothing) = operator(x, quantizer)
    assert len(LOOKED) == 2 and same is x and codes is x.row_data and nothing is None
    assert NOTED[0][5:9] == tuple(t.data_ptr() for t in (x.row_data, x.row_scale_inv, quantizer.scale, whole))
    assert (first.data_ptr(), second.data_ptr()) == (whole[0].data_ptr(), whole[1].data_ptr())
    assert first.shape == second.shape == (4, 8) and first.stride() == (8, 1)
    for others in (
        (record(shared=False), delayed()), (record(encoding="e5m2"), delayed()), (record(), delayed(torch.empty(1))),
        (record(), CurrentQuantizer()), (record(), CurrentQuantizer(epsilon=1.0)), (record(), None),
    ):  # fmt: skip
        assert times(operator, (*others, {})) == 1


@pytest.mark.parametrize("natively", [True, False])
def test_lists_that_are_known_are_told_apart(natively: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_facts, "_known", {})
    if not natively:  # as where PyTorch has no comparison of its own
        monkeypatch.setattr(guards, "TensorGuards", None)
    listed = lambda *tensors: [*tensors, *(torch.empty(4, 8) for _ in range(3))]  # noqa: E731
    known = [argument_facts._facts_of(listed(torch.empty(4, 8))) for _ in range(4)]
    assert known[2] is known[3]
    others = (
        torch.empty(8, 4), torch.empty(8, 4).t(), torch.empty(4, 16)[:, :8], torch.empty(4, 8, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.empty(4, 8)), torch.empty(4, 8, 1),
    )  # fmt: skip
    for x in others:
        for _ in range(3):
            assert argument_facts._facts_of(listed(x)) != known[0]
    assert argument_facts._facts_of(listed(torch.empty(4, 8))) == known[0]


def test_lists_that_are_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    argument_facts._tokens.clear()
    monkeypatch.setattr(argument_facts._tokens, "capacity", 8)
    for rows in range(1, 60):
        for _ in range(2):
            argument_facts._facts_of([torch.empty(rows, 2)])
        assert len(argument_facts._tokens) <= 8 and len(argument_facts._known[1]) <= argument_facts._ALIKE


def test_another_allocator_is_asked_and_what_it_misaligns_is_left_to_the_function() -> None:
    operator, asked = planted(), []
    times(operator, *[(matrix(), {})] * 2)

    def allocate(role: str, shape: Any, dtype: Any, device: Any, beside: int = 0) -> Any:
        asked.append((role, shape, dtype, device))
        return torch.empty(33, dtype=dtype)[beside : beside + 32].view(shape)

    alloc.set_allocator(allocate)
    assert times(operator, (matrix(), {})) == 0
    assert asked == [("out", (4, 8), torch.float32, torch.device("cpu"))]
    alloc.set_allocator(lambda *wanted: allocate(*wanted, beside=1))
    NOTED.clear()
    assert times(operator, (matrix(), {})) == 1 and len(NOTED) == 1


def test_pytorchs_own_entry_is_taken_where_it_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, entered = planted(), []
    entry = lambda *told: entered.append(told) or torch.empty(told[0], dtype=told[2])  # noqa: E731
    monkeypatch.setattr(alloc, "_empty_strided_cuda", entry)
    alloc.set_allocator(None)
    assert alloc.direct[0] is entry
    assert times(operator, *[(matrix(), {})] * 3) == 2
    monkeypatch.undo()
    assert entered == [((4, 8), (8, 1), torch.float32)]


def test_listeners_other_devices_and_changed_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = planted()
    assert times(operator, *[(matrix(), {})] * 3) == 2
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
        assert times(operator, (matrix(), {})) == 1
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_current", lambda: 1)
        assert times(operator, (matrix(), {})) == 1
    with launch.recording([]):
        assert times(operator, (matrix(), {})) == 1
    assert times(operator, (matrix(), {})) == 0
    prepared.forget()
    assert times(operator, *[(matrix(), {})] * 3) == 2


def test_an_operator_within_another_is_watched_with_it() -> None:
    inner = planted()
    assert times(inner, *[(matrix(), {})] * 3) == 2

    @prepared.prepared(None, x=TENSOR)
    def outer(x: Any) -> Any:
        return inner(x)

    for _ in range(2):
        outer(matrix())
    assert times(outer, (x := matrix(), {})) == 0
    assert NOTED[-1][5] == x.data_ptr()


def test_what_else_is_read_is_part_of_the_kind() -> None:
    setting = ["one"]

    @prepared.prepared(None, also=lambda: setting[0], x=TENSOR)
    def operator(x: Any) -> None:
        LOOKED.append("looked")
        launched(x, setting[0])

    assert times(operator, *[(matrix(), {})] * 3) == 2
    setting[0] = "two"
    assert times(operator, *[(matrix(), {})] * 3) == 2 and NOTED[-1][6] == "two"


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "CAPACITY", 4)
    monkeypatch.setattr(prepared, "MET", 8)
    operator = planted()
    for rows in range(1, 30):
        times(operator, *[(matrix(rows, 8), {})] * 3)
        assert len(operator.calls) <= 4 and len(operator.met) <= 8


def test_errors_are_the_functions_own_and_nothing_is_learned_from_them() -> None:
    @prepared.prepared(None, x=TENSOR)
    def operator(x: Any) -> None:
        LOOKED.append("looked")
        raise ValueError("x: what is wrong with it")

    for wrong in (matrix(), None, "text", [1]):
        for _ in range(3):
            with pytest.raises(ValueError, match="what is wrong"):
                operator(wrong)
    assert len(LOOKED) == 12 and not operator.calls


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.timeout(300)
def test_every_operators_prepared_calls_do_what_its_host_function_does() -> None:
    """All calls of the cross-compile matrix, at new addresses, launch by launch."""
    environment = {name: value for name, value in os.environ.items() if name != probe.INTERPRET}
    command = [sys.executable, str(Path(__file__).with_name("prepared_calls.py"))]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert not told["wrong"], "\n".join(": ".join(one)[:600] for one in told["wrong"])
    assert len(told["compared"]) > 30 and sum(told["compared"].values()) > 300, told["compared"]
