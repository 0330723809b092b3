# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A sequence of modules that also carries the argument which the modules of this package share."""

from __future__ import annotations

import inspect
from typing import Any

import torch


class Sequential(torch.nn.Sequential):
    """`torch.nn.Sequential` whose call takes `is_first_microbatch` and hands it to every module that knows it.

    Holds modules of this package and of `torch.nn` alike. A module that returns a tuple passes it on whole, as in
    `torch.nn.Sequential`.
    """

    def forward(self, input: Any, is_first_microbatch: bool | None = None) -> Any:
        """Run the modules in order.

        Args:
            input: of the first module.
            is_first_microbatch: whether weights must be quantized anew; None for always and without caching.
        """
        if is_first_microbatch is None:
            return super().forward(input)
        for module in self:
            if _takes_microbatch(module):
                input = module(input, is_first_microbatch=is_first_microbatch)
            else:
                input = module(input)
        return input


def _takes_microbatch(module: torch.nn.Module) -> bool:
    return "is_first_microbatch" in inspect.signature(module.forward).parameters
