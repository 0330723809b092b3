# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Native calls of the training family refuse wrong arguments by name, before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest

_ADAM = (0.1, 0.9, 0.99, 1e-8, 1.0, 1.0, 0.0, True, 0, 0)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("dropout_add_fwd", (0, 0, 0, 0, 0, 0, 32, 0, 8, 4, 0.0, 0, 0), "x: got a null pointer for 8 elements"),
        ("dropout_add_fwd", (0, 0, 32, 0, 0, 0, 32, 0, 8, 4, 0.5, 0, 0), "rng_state: got a null pointer"),
        ("dropout_add_fwd", (0, 0, 32, 0, 0, 32, 32, 0, 8, 4, 0.5, 0, 0), "mask: got a null pointer"),
        ("dropout_add_fwd", (0, 0, 32, 0, 0, 0, 32, 0, 8, 4, 1.0, 0, 0), "dropout_p: got 1"),
        ("dropout_add_bwd", (0, 0, 33, 0, 32, 8, 0.0, 1), "dy: got a pointer that is not a multiple of 2 bytes"),
        ("dropout_add_bwd", (0, 0, 32, 0, 32, -1, 0.0, 1), "dy: got -1"),
        ("multi_tensor_adam", (0, 0, [4, 4], [4], [4], [4], [], [1, 1], 0, *_ADAM), "grads: got 1 tensors, expected 2"),
        ("multi_tensor_adam", (0, 0, [4, 0], [4, 4], [4, 4], [4, 4], [], [1, 1], 0, *_ADAM), "params[1]: got a null"),
        ("multi_tensor_adam", (0, 0, [4], [4], [4], [2], [], [1], 0, *_ADAM), "exp_avg_sqs[0]: got a pointer that"),
        ("multi_tensor_l2norm", (0, 0, [4], [99_999], [0], 4, 2, 4, False), "partials: got 2 elements, expected 4"),
        ("multi_tensor_scale", (0, 0, [4], [6], [1], [1], [0], 1.0, 0), "outputs[0]: got a pointer"),
        ("moe_sort", (0, 0, 4, 0, 4, 0, 8, 2**31, 4, False, 0), "indices: got 2147483648 choices"),
        ("moe_sort", (0, 0, 4, 0, 4, 0, 4, 8, 4, True, 0), "indices: got a pointer that is not a multiple of 8"),
        ("moe_spread", (0, 0, 4, 4, 8, 4, 2**40, 2**40, 4, 4), "row_map: got 1099511627776 x 1099511627776 elements"),
        ("moe_unpermute", (0, 0, 4, 0, 0, 4, 4, 2, 8, 8, 0, 0), "row_map: got a null pointer for 8 elements"),
        ("moe_unpermute_bwd", (0, 0, 4, 4, 4, 4, 4, 0, 4, 4, 2, 8, 8, 0, 0, 0), "dprobs: got a null pointer"),
    ],
)
def test_a_wrong_argument_is_named(native: Any, name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        getattr(native, name)(*arguments)
    assert str(error.value).startswith(message)


def test_a_sort_needs_no_more_memory_for_more_choices(native: Any) -> None:
    assert native.moe_sort_workspace(0) < native.moe_sort_workspace(32768) == native.moe_sort_workspace(2**31 - 1)
