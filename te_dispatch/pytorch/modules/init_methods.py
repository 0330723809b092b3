# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Functions that initialize a weight, for ``init_method`` and ``output_layer_init_method``."""

from __future__ import annotations

import math

import torch

from te_dispatch.pytorch.modules.parameters import InitMethod, default_init

__all__ = ["get_default_init_method", "init_method_constant", "init_method_normal", "scaled_init_method_normal"]


def get_default_init_method() -> InitMethod:
    """What initializes a weight that no ``init_method`` initializes: a normal distribution."""
    return default_init


def init_method_constant(val: float) -> InitMethod:
    """A function that fills a tensor with `val`."""
    return lambda tensor: torch.nn.init.constant_(tensor, val)


def init_method_normal(sigma: float) -> InitMethod:
    """A function that fills a tensor from a normal distribution of mean 0 and standard deviation `sigma`."""
    return lambda tensor: torch.nn.init.normal_(tensor, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> InitMethod:
    """`init_method_normal` of sigma / sqrt(2 * num_layers), for the weights whose products join a residual stream.

    Each of `num_layers` layers adds two of them (Radford et al., "Language Models are Unsupervised Multitask
    Learners", 2019, section 2.3).
    """
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))
