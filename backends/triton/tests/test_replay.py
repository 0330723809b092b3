# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A call like one before does what the host function would have done, and nothing of one call is left in another."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
launch = pytest.importorskip("te_dispatch_triton.launch")
knobs = pytest.importorskip("triton.knobs")

from te_dispatch.backend_kit import caches  # noqa: E402
from te_dispatch.backend_kit.call_plans import TENSOR  # noqa: E402
from te_dispatch.core.bind import _twin  # noqa: E402
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized  # noqa: E402
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer  # noqa: E402
from te_dispatch.ops import alloc  # noqa: E402
from te_dispatch.ops.checks import guards  # noqa: E402
from te_dispatch.ops.checks.signatures import NUMBER, OPERAND, OPERANDS, OPTIONAL, OPTIONAL_QUANTIZER  # noqa: E402
from te_dispatch_triton import probe, replay  # noqa: E402
from te_dispatch_triton.memory import address, dense, empty  # noqa: E402
from te_dispatch_triton.tape import ACTIVE, read  # noqa: E402

LOOKED: list[str] = []
NOTED: list[Any] = []


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replay, "_LEAST", -1)
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

    @replay.replayed(None, **{"x": TENSOR, "scale": NUMBER, **kinds})
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


def test_the_third_call_of_a_signature_is_replayed_with_its_own_tensors() -> None:
    operator = planted()
    x, y, z = matrix(), matrix(), matrix()
    assert times(operator, (x, {}), (y, {}), (z, {}), (x, {})) == 2
    alloc_order = [noted[5:7] for noted in NOTED]
    assert [first for first, _ in alloc_order] == [t.data_ptr() for t in (x, y, z, x)]
    NOTED.clear()
    out = operator(z)
    assert list(NOTED) == [(3, 2, 1, 7, "metadata", z.data_ptr(), out.data_ptr(), 1.0, "a", 4, None, "BLOCK")]
    assert (out.shape, out.dtype) == (z.shape, z.dtype)
    plans = operator.plans
    assert (plans.hits, plans.misses) == (3, 2)
    assert len(plans.launches(*plans.signature((z, None, "a", 1.0)))) == 1


@pytest.mark.parametrize(
    "other",
    [
        (matrix(8, 4), {}), (matrix(dtype=torch.bfloat16), {}), (matrix(4, 16)[:, :8], {}), (matrix(8, 4).t(), {}),
        (matrix(), {"option": "b"}), (matrix(), {"scale": 2.0}), (matrix(), {"scale": 1}), (matrix(), {"scale": True}),
        (matrix(), None, {"option": None}), (torch.empty(33)[1:].view(4, 8), {}),
        (matrix().as_subclass(type("Other", (torch.Tensor,), {})), {}),
    ],
)  # fmt: skip
def test_whatever_differs_has_another_signature(other: Any) -> None:
    operator = planted()
    assert times(operator, *[(matrix(), {})] * 3) == 2
    assert times(operator, other) == 1
    assert times(operator, (matrix(), {})) == 0


def test_zeros_of_either_sign_have_two_signatures() -> None:
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


def test_what_pytorch_computes_is_never_replayed() -> None:
    @replay.replayed(None, x=TENSOR)
    def operator(x: Any) -> Any:
        LOOKED.append("looked")
        launched(dense(x))
        return None

    assert times(operator, *[(matrix(8, 4).t(), {})] * 4) == 4
    assert times(operator, *[(matrix(), {})] * 4) == 2


@pytest.mark.parametrize("count", [2, 20])
def test_addresses_in_numbers_are_followed_or_refused(count: int) -> None:
    @replay.replayed(None, xs=OPERANDS)
    def operator(xs: Any) -> None:
        LOOKED.append("looked")
        launched(xs[1], tuple(word for x in xs for word in ((address(x) + 4) | 1 << 62, 2 * address(x) + 1, 4)))

    first, second = ([matrix() for _ in range(count)] for _ in range(2))
    assert times(operator, (first, {}), (first, {})) == 2
    NOTED.clear()
    assert times(operator, (second, {})) == 0
    expected = tuple(n for x in second for n in ((x.data_ptr() + 4) | 1 << 62, 2 * x.data_ptr() + 1, 4))
    assert list(NOTED) == [(3, 2, 1, 7, "metadata", second[1].data_ptr(), expected, "BLOCK")]
    second[0] = torch.empty(33)[1:].view(4, 8)  # at another alignment
    assert times(operator, (second, {}), (second, {}), (first, {})) == 2

    @replay.replayed(None, x=TENSOR)
    def careless(x: Any) -> None:
        LOOKED.append("looked")
        launched((x.data_ptr(),))

    assert times(careless, *[(matrix(), {})] * 4) == 4


def test_addresses_of_parts_are_multiplied_whole_and_empty_parts_have_none() -> None:
    @replay.replayed(None, x=TENSOR)
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
    @replay.replayed(None, x=TENSOR)
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
    operator = planted(y=OPTIONAL)
    x, y = matrix(), matrix()
    assert times(operator, *[(x, x, {})] * 4) == 4
    assert times(operator, *[(x, y, {})] * 4) == 2


def test_records_quantizers_and_what_comes_back() -> None:
    @replay.replayed(None, x=OPERAND, quantizer=OPTIONAL_QUANTIZER)
    def operator(x: Any, quantizer: Any) -> Any:
        LOOKED.append("looked")
        whole = empty("dq", (2, *x.shape), torch.float32, x.device)
        launched(x.row_data, x.row_scale_inv, getattr(quantizer, "scale", None), whole)
        return x.row_data, whole.unbind(0), [whole, None]

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
    codes, (first, second), (whole, nothing) = operator(x, quantizer)
    assert len(LOOKED) == 2 and codes is x.row_data and nothing is None
    assert NOTED[0][5:9] == tuple(t.data_ptr() for t in (x.row_data, x.row_scale_inv, quantizer.scale, whole))
    assert (first.data_ptr(), second.data_ptr()) == (whole[0].data_ptr(), whole[1].data_ptr())
    assert first.shape == second.shape == (4, 8) and first.stride() == (8, 1)
    for others in (
        (record(shared=False), delayed()), (record(encoding="e5m2"), delayed()), (record(), delayed(torch.empty(1))),
        (record(), CurrentQuantizer()), (record(), CurrentQuantizer(epsilon=1.0)), (record(), None),
    ):  # fmt: skip
        assert times(operator, (*others, {})) == 1


def test_a_record_that_is_returned_is_the_calls_own() -> None:
    @replay.replayed(None, x=OPERAND)
    def operator(x: Any) -> Any:
        LOOKED.append("looked")
        launched(x.row_data)
        return x

    for _ in range(4):
        x = Quantized(
            torch.empty(4, 8, dtype=torch.uint8), None, torch.empty(1), None, "e4m3fn", "tensor", CANONICAL_SCALES,
            (4, 8), torch.bfloat16, torch.device("cpu"),
        )  # fmt: skip
        assert operator(x) is x
    assert len(LOOKED) == 4


def test_a_launch_that_was_asked_for_early_replays_once_there_is_a_recording() -> None:
    """A module captures its operators' calls in its first step, before they are recorded."""
    operator = planted()
    given = {"y": None, "option": "a", "scale": 1.0}
    assert operator.plans.repeat(("x",), x=matrix(), **given) is None
    operator(matrix())
    repeated = operator.plans.repeat(("x",), x=matrix(), **given)
    LOOKED.clear()
    for ran in (1, 1, 1):
        x = matrix()
        out = repeated(x)
        assert NOTED[-1][5:7] == (x.data_ptr(), out.data_ptr()) and len(LOOKED) == ran
    assert operator.plans.hits == 0  # without a lookup
    caches.clear(__name__)
    repeated(x)
    assert len(LOOKED) == 2


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
    caches.clear(__name__)
    assert times(operator, *[(matrix(), {})] * 3) == 2


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_an_operator_within_another_is_recorded_with_it(
    before: int, natively: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not natively:  # PyTorch's own comparison finds nothing while a mode of dispatch is entered
        monkeypatch.setattr(guards, "TensorGuards", None)
    inner = planted()
    for _ in range(before):
        inner(matrix())

    @replay.replayed(None, x=TENSOR)
    def outer(x: Any) -> Any:
        LOOKED.append("looked")
        return inner(x), inner(x)

    for _ in range(2):
        outer(matrix())
    NOTED.clear()
    assert times(outer, (x := matrix(), {})) == 0
    assert [noted[5] for noted in NOTED] == [x.data_ptr()] * 2


def test_a_recording_holds_for_the_settings_that_it_read() -> None:
    setting = ["one"]

    def current() -> str:
        return setting[0]

    @replay.replayed(None, x=TENSOR)
    def operator(x: Any) -> None:
        LOOKED.append("looked")
        launched(x, read(current))

    assert times(operator, *[(matrix(), {})] * 3) == 2
    setting[0] = "two"
    assert times(operator, *[(matrix(), {})] * 3) == 1 and NOTED[-1][6] == "two"
    setting[0] = "one"
    assert times(operator, *[(matrix(), {})] * 3) == 0 and NOTED[-1][6] == "one"


def test_what_cannot_be_recorded_is_tried_once() -> None:
    recorded: list[Any] = []

    @replay.replayed(None, x=TENSOR)
    def operator(x: Any) -> Any:
        recorded.append(bool(ACTIVE))
        return x.sum()

    for _ in range(4):
        operator(matrix())
    assert recorded == [False, True, False, False]
    assert operator.plans.repeat(("x",), x=matrix())(torch.ones(4, 8)) == 32


def test_threads_do_not_record_each_others_launches() -> None:
    operator, other, errors = planted(), planted(), []
    operator(matrix())

    @replay.replayed(None, x=TENSOR)
    def outer(x: Any) -> None:
        def elsewhere() -> None:
            try:
                other(matrix())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        launched(x)

    outer(matrix())
    outer(matrix())
    NOTED.clear()
    assert times(outer, (x := matrix(), {})) == 0 and not errors
    assert list(NOTED) == [(3, 2, 1, 7, "metadata", x.data_ptr(), "BLOCK")]


def test_errors_are_the_functions_own_and_nothing_is_learned_from_them() -> None:
    @replay.replayed(None, x=TENSOR)
    def operator(x: Any) -> None:
        LOOKED.append("looked")
        raise ValueError("x: what is wrong with it")

    for wrong in (matrix(), None, "text", [1]):
        for _ in range(3):
            with pytest.raises(ValueError, match="what is wrong"):
                operator(wrong)
    assert len(LOOKED) == 12 and not operator.plans.statistics().size


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.timeout(300)
def test_every_operators_replayed_calls_do_what_its_host_function_does() -> None:
    """All calls of the cross-compile matrix, at new addresses, launch by launch."""
    environment = {name: value for name, value in os.environ.items() if name != probe.INTERPRET}
    command = [sys.executable, str(Path(__file__).with_name("replayed_calls.py"))]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert not told["wrong"], "\n".join(": ".join(one)[:600] for one in told["wrong"])
    assert len(told["compared"]) > 30 and sum(told["compared"].values()) > 300, told["compared"]
