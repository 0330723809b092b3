# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Parameters of the GEMM modules: initialization, and one weight as several named parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_dispatch.common.recipe import Recipe
from te_dispatch.pytorch.arguments import PARALLEL_DEFAULTS, resolve_device

#: Standard deviation of a weight that no `init_method` initializes, as in Transformer Engine.
INIT_STD = 0.023

InitMethod = Callable[[torch.Tensor], Any]

#: What the modules do not do yet: the only value each argument may have.
UNSUPPORTED: dict[str, Any] = {
    **PARALLEL_DEFAULTS,
    "return_layernorm_output_gathered": False,
    "delay_wgrad_compute": False,
    "symmetric_ar_type": None,
    "save_original_input": False,
}


def require_size(name: str, value: Any) -> None:
    """Raise unless `value` is a positive int."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")


def parameter_factory(device: torch.device | str | int | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """Keywords for `torch.empty` of a module's parameters: None for `resolve_device`'s choice and PyTorch's dtype."""
    return {"device": resolve_device(device), "dtype": dtype or torch.get_default_dtype()}


def check_alignment(module_name: str, recipe: Recipe, inp: torch.Tensor, features: Mapping[str, int]) -> None:
    """Raise a ValueError unless all GEMM dimensions suit the recipe's kernels."""
    alignment = recipe.alignment
    rows = inp.numel() // inp.shape[-1] if inp.shape[-1] else 0
    if not rows % alignment:
        for size in features.values():
            if size % alignment:
                break
        else:
            return
    for dimension, size in (("the number of rows of inp (all dimensions but the last)", rows), *features.items()):
        if size % alignment:
            raise ValueError(
                f"{module_name}: under {type(recipe).__name__} {dimension} must be divisible by "
                f"{alignment}, got {size}; te_dispatch.pytorch.Fp8Padding pads rows"
            )


def default_init(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(weight, mean=0.0, std=INIT_STD)


def split_sizes(parameters_split: Sequence[str] | Mapping[str, int] | None, out_features: int) -> dict[str, int] | None:
    """Rows of each part by name; None for one undivided weight.

    Raises:
        ValueError, TypeError: names or sizes that do not divide `out_features`.
    """
    if parameters_split is None:
        return None
    if isinstance(parameters_split, Mapping):
        sizes = {str(name).rstrip("_"): rows for name, rows in parameters_split.items()}
        for name, rows in sizes.items():
            require_size(f"parameters_split[{name!r}]", rows)
        if len(sizes) != len(parameters_split) or sum(sizes.values()) != out_features:
            raise ValueError(
                f"parameters_split must have distinct names and add up to out_features={out_features}, "
                f"got {dict(parameters_split)}"
            )
        return sizes
    if isinstance(parameters_split, str) or not isinstance(parameters_split, Sequence):
        raise TypeError(f"parameters_split must be names or a dict of sizes, got {parameters_split!r}")
    names = [str(name).rstrip("_") for name in parameters_split]
    if not names or len(set(names)) != len(names) or out_features % len(names):
        raise ValueError(
            f"parameters_split must be distinct names whose number divides out_features={out_features}, "
            f"got {tuple(parameters_split)}"
        )
    return {name: out_features // len(names) for name in names}


def add_split_parameters(
    module: torch.nn.Module,
    sizes: Mapping[str, int] | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[list[str], list[str]]:
    """Register a weight (out, in) and a bias (out,), whole or in parts that share their memory.

    Returns:
        Names of the weights and of the biases, in row order: ``weight`` and ``bias``, or ``<part>_weight``,
        ``<part>_bias``.
    """
    if sizes is None:
        sizes = {"": weight.shape[0]}
    weights, biases, start = [], [], 0
    for name, rows in sizes.items():
        prefix = f"{name}_" if name else ""
        module.register_parameter(f"{prefix}weight", torch.nn.Parameter(weight[start : start + rows]))
        weights.append(f"{prefix}weight")
        if bias is not None:
            module.register_parameter(f"{prefix}bias", torch.nn.Parameter(bias[start : start + rows]))
            biases.append(f"{prefix}bias")
        start += rows
    return weights, biases


class _JoinRows(torch.autograd.Function):
    """Concatenation along dimension 0, without a copy where the parts still lie one after the other."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        first = parts[0]
        end = first.data_ptr()
        for part in parts:
            if part.data_ptr() != end or not part.is_contiguous() or not _same_storage(part, first):
                return torch.cat(parts)
            end += part.numel() * part.element_size()
        shape = (sum(ctx.rows), *first.shape[1:])
        joined = torch.empty(0, dtype=first.dtype, device=first.device)
        return joined.set_(first.untyped_storage(), first.storage_offset(), shape, first.stride())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad.split(ctx.rows)


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def joined(module: torch.nn.Module, names: Sequence[str]) -> torch.Tensor | None:
    """The parameters `names` of a module as one tensor, with gradients; None where there are no names."""
    if not names:
        return None
    if len(names) == 1:
        # Past Module.__getattr__, which costs half a microsecond; a parametrized module lacks the entry.
        found = module._parameters.get(names[0])
        return found if found is not None else getattr(module, names[0])  # type: ignore[no-any-return]
    parts = [getattr(module, name) for name in names]
    if torch.compiler.is_compiling() or type(parts[0]) not in (torch.Tensor, torch.nn.Parameter):
        return torch.cat(parts)
    return _JoinRows.apply(*parts)  # type: ignore[no-any-return]


def empty_result(inp: torch.Tensor, features: int, parameters: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The result for an input without rows: empty, but part of the graph, so that gradients are zero, not absent."""
    out = inp.sum(-1, keepdim=True).expand(*inp.shape[:-1], features)
    for parameter in parameters:
        if parameter is not None:
            out = out + parameter.sum().to(out.dtype)
    return out


def without_rows(result: Any) -> Any:
    """What a module returned for one row, for a caller that gave a vector; a bias stays as it is."""
    if isinstance(result, torch.Tensor):
        return result[0]
    return tuple(part[0] if part is not None and part.dim() > 1 else part for part in result)
