# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Softmax, rotary embedding and training kernels of the cuda backend, where the conformance kit's calls do not reach:
more tensors than one launch takes, experts beyond the counted ones, long rows, graphs whose random state changes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.conformance.bounds import position as position_bounds
from te_dispatch.conformance.bounds import softmax as softmax_bounds
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.rules import judge

position = pytest.importorskip("te_dispatch_cuda.position")
softmax = pytest.importorskip("te_dispatch_cuda.softmax")
training = pytest.importorskip("te_dispatch_cuda.training")
torch_training = pytest.importorskip("te_dispatch_torch.training")

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(31)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bytes(_bytes(a)) == bytes(_bytes(b))


def _bytes(x: torch.Tensor) -> Any:
    return x.detach().contiguous().view(torch.uint8).cpu().numpy()


def assert_within(known: Known, actual: torch.Tensor) -> None:
    actual = actual.cpu()
    expected = known.value.float().reshape(actual.shape)
    finding = judge("result", within(known, expected, actual), actual, expected)
    assert finding.passed, finding.message


# -- lists of tensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [33, 110, 1300])
@pytest.mark.parametrize("masters", [False, True])
def test_a_step_of_many_tensors_equals_the_steps_of_each(count, masters):
    sizes = [(7919 * i) % 5000 for i in range(count - 1)] + [200_001]
    params = [random(n, dtype=torch.bfloat16) for n in sizes]
    state = {name: [random(n) for n in sizes] for name in ("exp_avgs", "master")}
    state |= {"grads": [random(n) for n in sizes], "exp_avg_sqs": [random(n).square() for n in sizes]}
    if not masters:
        del state["master"]
    options = {"lr": 0.1, "weight_decay": 0.01, "step": 3}
    alone = {name: [x.clone() for x in tensors] for name, tensors in {"params": params, **state}.items()}
    training.multi_tensor_adam(params=params, **state, **options)
    for i in range(count):
        training.multi_tensor_adam(**{name: [tensors[i]] for name, tensors in alone.items()}, **options)
    for name, tensors in {"params": params, **state}.items():
        assert all(map(same_bits, tensors, alone[name])), name


def test_norms_of_many_tensors_equal_those_of_each():
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    tensors = [random((7919 * i) % 3000, dtype=dtypes[i % 3]) for i in range(1400)] + [random(3, 100_001)]
    norms = training.multi_tensor_l2norm(tensors, per_tensor=True)
    assert same_bits(norms, torch.cat([training.multi_tensor_l2norm([x]) for x in tensors]))
    # A norm of rounded norms: half an ulp each for the squares' sums, half for the roots.
    whole = training.multi_tensor_l2norm(tensors).double()
    assert abs(whole / norms.double().norm() - 1) < (len(tensors) + 200) * 2.0**-24


def test_a_list_may_mix_dtypes_and_any_entry_raises_the_flag():
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    inputs = [random(1 + i % 70, dtype=dtypes[i % 3]) for i in range(1100)]
    outputs = [torch.empty_like(x, dtype=dtypes[i // 3 % 3]) for i, x in enumerate(inputs)]
    flag = torch.zeros(1, device=DEVICE)
    training.multi_tensor_scale(inputs, outputs, 0.3, noop_flag=flag)
    assert all(same_bits(y, (x.float() * 0.3).to(y.dtype)) for x, y in zip(inputs, outputs))
    assert flag.item() == 0
    inputs[1090][-1] = torch.inf
    training.multi_tensor_scale(inputs, outputs, 0.3, noop_flag=flag)
    assert flag.item() == 1


def test_tensors_that_are_not_contiguous_are_updated_in_place():
    made = {name: random(33, 40).square() for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    plain = {name: [x.t().contiguous()] for name, x in made.items()}
    views = {name: [x.t()] for name, x in made.items()}
    training.multi_tensor_adam(**plain, lr=0.1)
    training.multi_tensor_adam(**views, lr=0.1)
    assert all(same_bits(plain[name][0], views[name][0]) for name in made)


# -- dropout ----------------------------------------------------------------------------------------------------------


def test_a_captured_dropout_follows_its_random_state():
    x, state = random(64, 1000, dtype=torch.bfloat16), torch.tensor([5, 7], device=DEVICE)

    def call() -> Any:
        return training.dropout_add_fwd(x, dropout_p=0.4, rng_state=state)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    masks = []
    for seed, offset in ((5, 7), (5, 8), (6, 7), (2**62 + 1, -3)):
        state.copy_(torch.tensor([seed, offset]))
        graph.replay()
        eager = call()
        assert same_bits(captured.mask, eager.mask) and same_bits(captured.out, eager.out)
        masks.append(captured.mask.clone())
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_a_mask_depends_on_the_random_state_and_the_place_alone():
    state = torch.tensor([11, 13], device=DEVICE)
    masks = [
        training.dropout_add_fwd(x, bias=bias, dropout_p=0.3, rng_state=state).mask.flatten()
        for x, bias in (
            (random(30, 64), None),
            (random(64, 30, dtype=torch.bfloat16), random(30)),
            (random(1921)[1:].view(1, 1920), None),
            (random(2 * 1920, dtype=torch.float16), None),
        )
    ]
    assert all(torch.equal(mask[:1920], masks[0]) for mask in masks)


# -- mixture of experts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [1, 31, 32, 33, 200, 700, 1024, 1025, 70_000])
@pytest.mark.parametrize("tokens", [1, 1000, 6001])
def test_a_sort_is_stable_for_any_number_of_experts(tokens, experts):
    indices = torch.randint(-1, experts, (tokens, 3), device=DEVICE, dtype=torch.int64)
    indices[0, 0] = experts - 1
    x, probs = random(tokens, 5), random(tokens, 3)
    for capacity in (None, tokens, 4 * tokens):
        mine = training.moe_permute(x, indices.int(), probs=probs, capacity=capacity)
        plain = torch_training.moe_permute(x, indices, probs=probs, capacity=capacity)
        assert all(map(same_bits, mine, plain))


def test_experts_may_have_any_number():
    indices = torch.tensor([[2**40], [3], [2**62], [-1], [3]], device=DEVICE)
    assert training.moe_permute(random(5, 4), indices).row_map.flatten().tolist() == [2, 0, 3, -1, 1]


# -- softmax and rotary embedding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [64, 250, 1024, 2048, 3000, 4096, 8192, 10_000, 16_384, 20_000, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_of_rows_of_any_length(columns, dtype):
    x, dy = random(2, 3, columns, dtype=dtype), random(2, 3, columns, dtype=dtype)
    mask = torch.rand(2, 1, columns, device=DEVICE) < 0.2
    y = softmax.softmax_fwd(x, mask, scale=1.7)
    assert_within(softmax_bounds.forward(x.cpu(), mask.cpu(), 1.7), y)
    assert_within(softmax_bounds.backward(dy.cpu(), y.cpu(), 1.7), softmax.softmax_bwd(dy, y, scale=1.7))


@pytest.mark.parametrize("shape", [(2, 3, 5, 33), (2, 2, 3, 5, 33), (1, 2, 2, 2, 3, 40)])
def test_masks_broadcast_along_any_dimensions(shape):
    x = random(*shape)
    for kept in range(2 ** len(shape)):
        sizes = [n if kept >> i & 1 else 1 for i, n in enumerate(shape)]
        mask = torch.rand(sizes, device=DEVICE) < 0.5
        assert_within(softmax_bounds.forward(x.cpu(), mask.cpu(), 1.0), softmax.softmax_fwd(x, mask))
    transposed = (torch.rand(shape[-1], shape[-2], device=DEVICE) < 0.5).t()
    assert_within(softmax_bounds.forward(x.cpu(), transposed.cpu(), 1.0), softmax.softmax_fwd(x, transposed))


@pytest.mark.parametrize("interleaved", [False, True])
def test_sequences_beyond_a_block_and_heads_beyond_one(interleaved):
    """Some 300 sequences, many of no length, and more heads than a block turns."""
    lengths = torch.randint(0, 2, (300,))
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    tokens, heads, features = int(starts[-1]) + 3, 300, 72
    angles = (
        torch.randn(8, 1, 1, 36).repeat_interleave(2, 3) if interleaved else torch.randn(8, 1, 1, 36).repeat(1, 1, 1, 2)
    )
    x, offsets = random(tokens, heads, features, dtype=torch.bfloat16), torch.randint(0, 5, (300,))
    y = position.rope_fwd(
        x, angles.to(DEVICE), layout="thd", interleaved=interleaved, cu_seqlens=starts.int().to(DEVICE),
        offsets=offsets.int().to(DEVICE),
    )  # fmt: skip
    found = torch.cat([torch.arange(int(n)) + o for n, o in zip(lengths, offsets)])
    turned = angles.reshape(8, features)[found].unsqueeze(1)
    assert_within(position_bounds.rotated(x[: found.numel()].cpu(), turned, interleaved, False), y[: found.numel()])


def test_a_position_without_angles_does_not_look_like_a_result():
    freqs = torch.zeros(4, 1, 1, 8, device=DEVICE)
    y = position.rope_fwd(random(2, 1, 1, 16), freqs, offsets=torch.tensor([3], dtype=torch.int32, device=DEVICE))
    assert y[0].isfinite().all() and y[1, ..., :8].isnan().all() and y[1, ..., 8:].isfinite().all()
