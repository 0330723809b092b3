# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Training kernels of the triton backend where the conformance kit's calls do not reach: the cuda backend's masks, more
tensors than one table holds, experts beyond the counted ones."""

from __future__ import annotations

import pytest
import torch

training = pytest.importorskip("te_dispatch_triton.training")
torch_training = pytest.importorskip("te_dispatch_torch.training")

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(31)


@pytest.mark.parametrize("shape", [(64, 65), (3, 5, 127), (8192, 4096)])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_those_of_the_cuda_backend(shape: tuple[int, ...], p: float) -> None:
    native = pytest.importorskip("te_dispatch_cuda.training")
    state = torch.tensor([0x1234567890ABCDEF, 0x7766554433221100], device=DEVICE)
    x, residual = (torch.randn(shape, device=DEVICE).bfloat16() for _ in range(2))
    found, other = (
        backend.dropout_add_fwd(x, residual, dropout_p=p, rng_state=state) for backend in (training, native)
    )
    assert torch.equal(found.mask, other.mask) and torch.equal(found.out, other.out)


@pytest.mark.parametrize("count", [32, 33, 1300])
def test_a_step_of_many_tensors_equals_the_steps_of_each(count: int) -> None:
    sizes = [(7919 * i) % 5000 for i in range(count - 1)] + [200_001]
    made = [[torch.randn(n, device=DEVICE).abs() for n in sizes] for _ in range(4)]
    made[0] = [x.bfloat16() for x in made[0]]
    alone = [[x.clone() for x in tensors] for tensors in made]
    training.multi_tensor_adam(*made, lr=0.1, weight_decay=0.01, step=3)
    for one in zip(*alone):
        training.multi_tensor_adam(*([x] for x in one), lr=0.1, weight_decay=0.01, step=3)
    for tensors, others in zip(made, alone):
        assert all(map(torch.equal, tensors, others))
    norms = training.multi_tensor_l2norm(made[1], per_tensor=True)
    each = torch.cat([training.multi_tensor_l2norm([x]) for x in made[1]])
    torch.testing.assert_close(norms, each, rtol=2.0**-22, atol=0.0)  # partial sums are added in another order


@pytest.mark.parametrize("experts", [1, 31, 200, 1000, 3000])
@pytest.mark.parametrize("tokens", [1, 300, 20_000])
def test_sorts_of_any_number_of_experts(experts: int, tokens: int) -> None:
    if experts > 1024:
        tokens = min(tokens, 3000)
    indices = torch.randint(-1, experts, (tokens, 3), device=DEVICE)
    x, probs = torch.randn(tokens, 40, device=DEVICE), torch.rand(tokens, 3, device=DEVICE)
    found = training.moe_permute(x, indices, probs=probs, capacity=tokens * 2)
    other = torch_training.moe_permute(x, indices, probs=probs, capacity=tokens * 2)
    assert all(map(torch.equal, found, other))
