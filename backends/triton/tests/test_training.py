# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Training operators beyond the conformance kit: the random stream's words, sorts of many experts, long lists."""

from __future__ import annotations

import pytest
import torch

from te_dispatch.ops.checks import training as checks


def philox(seed: int, low: int, high: int) -> list[int]:
    """Four words of Philox 4x32-10, from the paper's definition (Salmon et al., 2011), in Python's integers."""
    word = 0xFFFFFFFF
    c = [low & word, low >> 32, high & word, high >> 32 & word]
    key = [seed & word, seed >> 32 & word]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ key[0], q & word, p >> 32 ^ c[3] ^ key[1], p & word]
        key = [key[0] + 0x9E3779B9 & word, key[1] + 0xBB67AE85 & word]
    return c


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", [0x1234567890ABCDEF, -5])
def test_a_mask_is_the_comparison_of_philox_words(seed: int) -> None:
    from te_dispatch_triton import training

    offset, p, count = 0x7766554433221100, 0.3, 403
    state = torch.tensor([seed, offset])
    mask = training.dropout_add_fwd(torch.ones(1, count), dropout_p=p, rng_state=state).mask
    words = [word for i in range(-(-count // 4)) for word in philox(seed & 2**64 - 1, i, offset)]
    assert mask.tolist() == [[int(word >= round(p * 2**32)) for word in words[:count]]]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("experts", "index"),
    [(3, torch.int32), (40, torch.int64), (300, torch.int32), (1024, torch.int64), (5000, torch.int64)],
)
def test_a_sort_is_stable_for_any_number_of_experts(experts: int, index: torch.dtype) -> None:
    from te_dispatch_triton import training

    generator = torch.Generator().manual_seed(experts)
    indices = torch.randint(-1, experts, (300, 2), generator=generator).to(index)
    indices[0, 0], indices[1, 1] = experts - 1, -(2**31)
    x = torch.arange(300.0).view(-1, 1)
    found = training.moe_permute(x, indices, capacity=500)
    flat = indices.flatten().tolist()
    order = sorted((e, i) for i, e in enumerate(flat) if e >= 0)
    expected = [-1] * len(flat)
    for row, (_, i) in enumerate(order[:500]):
        expected[i] = row
    assert found.row_map.flatten().tolist() == expected
    rows = [float(i // 2) for _, i in order[:500]]
    assert found.permuted.flatten().tolist() == rows + [0.0] * (500 - len(rows))


@pytest.mark.interpreted
@pytest.mark.parametrize("length", [31, 1030])
def test_long_lists_of_any_alignment(length: int) -> None:
    from te_dispatch_triton import training

    buffer = torch.arange(4.0 * length + 7)
    lists = [buffer[3 * i + 1 : 3 * i + 1 + i % 3] for i in range(length)]
    outputs = [torch.zeros(x.shape, dtype=torch.bfloat16) for x in lists]
    flag = torch.zeros(1)
    training.multi_tensor_scale(lists, outputs, 2.0, noop_flag=flag)
    assert all(torch.equal(out, (x * 2.0).bfloat16()) for x, out in zip(lists, outputs)) and flag == 0
    norms = training.multi_tensor_l2norm(lists, per_tensor=True)
    torch.testing.assert_close(norms, torch.stack([x.norm() for x in lists]), rtol=1e-6, atol=0)


@pytest.mark.interpreted
def test_results_go_back_to_tensors_that_are_not_dense() -> None:
    from te_dispatch_triton import training

    memory = torch.zeros(6, 8)
    moments = [torch.zeros(6, 4), torch.zeros(6, 4)]
    training.multi_tensor_adam([memory[:, ::2]], [torch.ones(6, 4)], moments[:1], moments[1:], lr=0.5)
    torch.testing.assert_close(memory[:, ::2], torch.full((6, 4), -0.5))
    assert not memory[:, 1::2].any()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("dropout_add_fwd", {"x": torch.ones(2, 3), "dropout_p": 0.5}, "rng_state: got None"),
        ("dropout_add_bwd", {"dy": torch.ones(2, 3), "dropout_p": 1.0}, "dropout_p: got 1.0"),
        ("multi_tensor_l2norm", {"tensors": [torch.ones(2).int()]}, r"tensors\[0\]"),
        ("moe_permute", {"x": torch.ones(2, 3), "indices": torch.ones(2, 2)}, "indices: "),
    ],
)
def test_a_wrong_argument_is_named(name: str, arguments: dict[str, object], message: str) -> None:
    from te_dispatch_triton import training

    assert hasattr(checks, name)
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(training, name)(**arguments)
