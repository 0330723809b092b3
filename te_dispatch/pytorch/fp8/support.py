# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Whether a recipe can be used here: Transformer Engine's questions, answered by the dispatch.

There a GPU of some generation is asked for. Here a recipe can be used wherever an installed backend serves its casts
and products under the policy in force, on matrix units or emulated: `te-dispatch explain gemm` says which.
"""

from __future__ import annotations

import math

import torch

from te_dispatch import ops
from te_dispatch.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_dispatch.core import scopes
from te_dispatch.core.errors import NoImplementation
from te_dispatch.core.facts import CallFacts
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.resolve import resolve
from te_dispatch.numerics.encodings import ENCODINGS, device_encoding
from te_dispatch.pytorch.arguments import resolve_device
from te_dispatch.pytorch.fp8.autocast import require_usable
from te_dispatch.pytorch.tensor.dtypes import DType, device_encodings

__all__ = [
    "check_dim_for_fp8_exec",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_gemm_dims",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_recipe_support",
    "get_align_size_for_quantization",
    "get_cudnn_version",
    "get_device_compute_capability",
    "get_fp4_te_dtype",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_bf16_available",
    "is_bf16_compatible",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_non_tn_fp8_gemm_supported",
    "is_nvfp4_available",
]

#: A recipe's scalings of an input and a weight, and its encoding where that is not the device's own FP8.
_SCALINGS: dict[type[Recipe], tuple[str, str, str | None]] = {
    DelayedScaling: ("tensor", "tensor", None),
    Float8CurrentScaling: ("tensor", "tensor", None),
    Float8BlockScaling: ("block_1d", "block_2d", None),
    MXFP8BlockScaling: ("mxfp8", "mxfp8", None),
    NVFP4BlockScaling: ("nvfp4", "nvfp4", "e2m1"),
}


def _support(recipe: type[Recipe]) -> tuple[bool, str]:
    """Whether the forward product of a recipe is served on the current device, and why it is not."""
    of_input, of_weight, own = _SCALINGS[recipe]
    device = resolve_device(None)
    dtype = own or device_encoding("e4m3", device_encodings(device))
    call: CallFacts = {
        "layout": "NT", "a.dtype": dtype, "b.dtype": dtype, "a.scaling": of_input, "b.scaling": of_weight,
    }  # fmt: skip
    bindings = scopes.capture()
    facts = bindings.device_facts(device)
    if resolve(OPERATORS["gemm"], call, facts, bindings.policy, bindings.snapshot).accepted:
        return True, ""
    words = " ".join(f"{name}={value}" for name, value in call.items())
    return False, (
        f"no installed backend multiplies {recipe.__name__} operands on {facts.label()}: "
        f"te-dispatch explain gemm {words} says why"
    )


def check_fp8_support() -> tuple[bool, str]:
    """Whether FP8 with one scale for each tensor can be used on the current device, and if not, why."""
    return _support(DelayedScaling)


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """The same of `Float8BlockScaling`."""
    return _support(Float8BlockScaling)


def check_mxfp8_support() -> tuple[bool, str]:
    """The same of `MXFP8BlockScaling`."""
    return _support(MXFP8BlockScaling)


def check_nvfp4_support() -> tuple[bool, str]:
    """The same of `NVFP4BlockScaling`."""
    return _support(NVFP4BlockScaling)


def check_recipe_support(recipe: Recipe) -> None:
    """Raise where a recipe cannot be used on the current device.

    Raises:
        NotImplementedError: the recipe asks for something that is not built yet; names it.
        RuntimeError: no installed backend serves its products.
    """
    require_usable("check_recipe_support", recipe)
    if isinstance(recipe, CustomRecipe):
        return  # what it multiplies is known when a module asks its factory
    served, why = _support(next(kind for kind in _SCALINGS if isinstance(recipe, kind)))
    if not served:
        raise RuntimeError(why)


def _answer(found: tuple[bool, str], return_reason: bool) -> bool | tuple[bool, str]:
    return found if return_reason else found[0]


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """`check_fp8_support`, with the reason only where it is asked for."""
    return _answer(check_fp8_support(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """`check_fp8_block_scaling_support`, with the reason only where it is asked for."""
    return _answer(check_fp8_block_scaling_support(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """`check_mxfp8_support`, with the reason only where it is asked for."""
    return _answer(check_mxfp8_support(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """`check_nvfp4_support`, with the reason only where it is asked for."""
    return _answer(check_nvfp4_support(), return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether bf16 can be used on the current device: every backend here computes in it."""
    return _answer((True, ""), return_reason)


def is_bf16_compatible() -> bool:
    """`is_bf16_available`."""
    return True


def is_non_tn_fp8_gemm_supported() -> bool:
    """Whether the backward's FP8 products of per-tensor scaling read the row-wise copies that the forward's read.

    Where they do not, column-wise copies are made for them.
    """
    device = resolve_device(None)
    operand = (device_encoding("e4m3", device_encodings(device)), "tensor")
    try:
        formats = [ops.gemm_operand_format(device, *operand, *operand, layout) for layout in ("NN", "TN")]
    except NoImplementation:
        return False
    return all(usage == "row" for operands in formats for usage, _ in operands)


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """What the rows of each part of a grouped input are padded to under a recipe."""
    return recipe.row_alignment()


def check_dim_for_fp8_exec(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a matrix that `assert_dim_for_fp8_exec` lets pass."""
    return tensor.dim() == 2 and tensor.shape[0] % 8 == 0 and tensor.shape[1] % 16 == 0


def check_gemm_dims(inp: torch.Tensor, weight: torch.Tensor, fp8: bool) -> None:
    """Raise unless inp (.., K) can be multiplied with a weight (N, K), in FP8 as `assert_dim_for_fp8_exec` says.

    Raises:
        ValueError: the last dimensions differ, or are not multiples of what FP8 needs.
    """
    if inp.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"inp and weight must end in the same dimension, got shapes {tuple(inp.shape)} and {tuple(weight.shape)}"
        )
    if fp8:
        assert_dim_for_fp8_exec(inp, weight)


def assert_dim_for_fp8_exec(*tensors: torch.Tensor) -> None:
    """Raise unless tensors can be operands of FP8 products of per-tensor scaling, as Transformer Engine has it.

    Raises:
        ValueError: the last dimension is not divisible by 16, or the product of the others not by 8.
    """
    for tensor in tensors:
        if math.prod(tensor.shape[:-1]) % 8 or tensor.shape[-1] % 16:
            raise ValueError(
                "the last dimension of an FP8 operand must be divisible by 16 and the product of the others by 8, got "
                f"shape {tuple(tensor.shape)}"
            )


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """The dtype that a recipe casts to on the current device, such as float8_e4m3fn or float8_e4m3fnuz.

    Args:
        fprop_tensor: True for inputs and weights, False for gradients.

    Raises:
        ValueError: a recipe of 4 bits.
    """
    return getattr(torch, f"float8_{_fp8_encoding('get_fp8_torch_dtype', fp8_recipe, fprop_tensor)}")  # type: ignore[no-any-return]


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """The number of the type that a recipe casts to: `DType.kFloat8E4M3` or `DType.kFloat8E5M2`, on every device.

    Arguments and errors are those of `get_fp8_torch_dtype`.
    """
    e4m3 = _fp8_encoding("get_fp8_te_dtype", fp8_recipe, fprop_tensor).startswith("e4m3")
    return DType.kFloat8E4M3 if e4m3 else DType.kFloat8E5M2


def get_fp4_te_dtype(fp4_recipe: Recipe) -> DType:
    """The number of the type that a recipe of 4 bits casts to, `DType.kFloat4E2M1`.

    Raises:
        ValueError: another recipe.
    """
    if not fp4_recipe.nvfp4():
        raise ValueError(f"get_fp4_te_dtype: {type(fp4_recipe).__name__} does not cast to 4 bits")
    return DType.kFloat4E2M1


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """Where a recipe's casts saturate on the current device, under the policy in force.

    Arguments and errors are those of `get_fp8_torch_dtype`.
    """
    encoding = ENCODINGS[_fp8_encoding("get_fp8_max", fp8_recipe, fprop_tensor)]
    return encoding.common_max if ops.policy_numerics().fp8_portability == "common" else encoding.max


def _fp8_encoding(function: str, recipe: Recipe, forward: bool) -> str:
    if recipe.nvfp4():
        raise ValueError(f"{function}: {type(recipe).__name__} casts to 4 bits")
    family = recipe.fp8_format.fwd if forward else recipe.fp8_format.bwd
    return device_encoding(family, device_encodings(resolve_device(None)))


def get_device_compute_capability() -> tuple[int, int]:
    """(major, minor) of the current GPU, as PyTorch tells it.

    Raises:
        RuntimeError: PyTorch has no CUDA or ROCm device here.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("get_device_compute_capability: PyTorch has no CUDA or ROCm device here")
    return torch.cuda.get_device_capability()


def get_cudnn_version() -> tuple[int, int, int]:
    """(major, minor, patch) of the cuDNN that PyTorch uses.

    Raises:
        RuntimeError: PyTorch has none here.
    """
    version = torch.backends.cudnn.version() if torch.version.cuda else None
    if version is None:
        raise RuntimeError("get_cudnn_version: PyTorch uses no cuDNN here")
    # From cuDNN 9 on two digits for each of minor and patch, before that one of the minor.
    unit = 10000 if version >= 90000 else 1000
    return version // unit, version % unit // 100, version % 100
