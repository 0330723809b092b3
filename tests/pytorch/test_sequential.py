# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Sequential."""

from __future__ import annotations

import torch

from te_dispatch.pytorch.modules.sequential import Sequential


class Noting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool | None] = []

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        self.seen.append(is_first_microbatch)
        return inp + 1.0


def test_modules_run_in_order_and_hear_of_the_microbatch() -> None:
    first, last = Noting(), Noting()
    model = Sequential(first, torch.nn.ReLU(), last)
    x = torch.tensor([-3.0, 1.0])
    wanted = torch.relu(x + 1.0) + 1.0
    for flag in (None, True, False):
        assert torch.equal(model(x, is_first_microbatch=flag), wanted)
    assert first.seen == last.seen == [None, True, False]


def test_it_is_a_torch_sequential() -> None:
    model = Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    twin = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    twin.load_state_dict(model.state_dict())
    x = torch.randn(4, 2)
    assert torch.equal(model(x), twin(x)) and len(model[:1]) == 1
