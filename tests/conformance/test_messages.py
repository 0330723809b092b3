# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What failures say: what is wrong in one line, never a whole tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.cli.conformance_view import Speed
from te_dispatch.conformance import last_words
from te_dispatch.conformance.outcome import bounded
from te_dispatch.conformance.outputs import differing_form
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure
from tests.conformance.trials import Mistake, case_of, trial_of


def _ignores(right: Subject, given: Mapping[str, Any]) -> Any:
    return right.call({**given, "out": None})


def _copies(right: Subject, given: Mapping[str, Any]) -> Any:
    made = right.call(given)
    return made._replace(out=made.out.clone())


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (_ignores, "out was given, and was neither written nor returned"),
        (_copies, "out was given and written, but another tensor was returned"),
    ],
)
def test_an_output_that_is_not_returned(kernel: Mistake, words: str) -> None:
    trial = trial_of(case_of("gemm", "plain", out="given"), "torch.matmul", kernel)
    arguments = trial.on_device()
    with pytest.raises(Failure, match=f"^{words}$"):
        trial.judge(trial.call(arguments), arguments)


@pytest.mark.parametrize("wrap", [lambda x: (x,), lambda x: [x] * 9, lambda x: {"y": x}])
def test_a_result_of_another_type_is_told_without_its_numbers(wrap: Any) -> None:
    told = differing_form(wrap(torch.full((100, 100), 0.125)), torch.empty(100, 100))
    assert told is not None and "0.125" not in told and "\n" not in told and len(told) < 400


def test_messages_are_bounded() -> None:
    told = bounded("\n".join(["x" * 5000, *"y" * 100]))
    assert len(told.split("\n")[0]) == 600 and told.endswith("... 81 more lines")
    assert bounded("short\ntwo") == "short\ntwo"


_DUMP = """loading
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 10 in wait

Current thread 0x00007f02 (most recent call first):
  File "/site/vendor/kernels.py", line 7 in launch
  File "/site/vendor/softmax.py", line 30 in softmax_bwd

Extension modules: numpy (total: 1)
"""


def test_the_frames_of_a_crash_are_those_of_its_thread() -> None:
    assert last_words.parted(_DUMP) == ("loading\n", "launch (kernels.py:7) < softmax_bwd (softmax.py:30)")
    assert last_words.parted("nothing but text") == ("nothing but text", "")


def test_the_frames_of_a_hang_are_those_of_a_thread_that_does_not_wait() -> None:
    asked = _DUMP.replace("Fatal Python error: Segmentation fault\n\n", "").replace("Current thread", "Thread")
    waits = asked.replace("/site/vendor/kernels.py", "/lib/queue.py")
    assert last_words.parted(asked)[1].startswith("launch (kernels.py:7)")
    assert last_words.parted(waits)[1] == "wait (threading.py:10)"


def test_the_remaining_time_follows_the_last_minutes() -> None:
    speed, told = Speed(), []
    for minute, done in enumerate((0, 100, 200, 300, 600, 900)):
        speed.ran, speed.waiting = done, 1200 - done
        told.append(speed.left(60.0 * minute))
    assert told == ["", "", "", "9 min", "4 min", "2 min"]
