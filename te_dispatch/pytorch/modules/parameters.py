# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Parameters of the GEMM modules: initialization, and one weight as several named parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.ops.checks.guards import PLAIN
from te_dispatch.pytorch.arguments import PARALLEL_DEFAULTS, resolve_device
from te_dispatch.pytorch.fp8.autocast import trains
from te_dispatch.torch_private import dispatch_modes, outside_modes

if TYPE_CHECKING:
    from te_dispatch.pytorch.fp8.casts import Plan

#: Standard deviation of a weight that no `init_method` initializes, as in Transformer Engine.
INIT_STD = 0.023

InitMethod = Callable[[torch.Tensor], Any]

#: What the modules do not do yet: the only value each argument may have.
UNSUPPORTED: dict[str, Any] = {
    **PARALLEL_DEFAULTS,
    "symmetric_ar_type": None,
}


def require_size(name: str, value: Any) -> None:
    """Raise unless `value` is a positive int."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")


def parameter_factory(device: torch.device | str | int | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """Keywords for `torch.empty` of a module's parameters: None for `resolve_device`'s choice and PyTorch's dtype."""
    return {"device": resolve_device(device), "dtype": dtype or torch.get_default_dtype()}


def materialize(module: torch.nn.Module) -> bool:
    """Give a module whose parameters are on the meta device uninitialized ones on the current accelerator or the CPU.

    Called by `reset_parameters`, which fills them. The first call for a module, its constructor's, leaves them: what is
    made on the meta device stays there until the user asks.

    Returns:
        Whether there were any.
    """
    made = module.__dict__.get("_constructed", False)
    module._constructed = True  # type: ignore[assignment]
    if not made or not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return False
    module.to_empty(device=resolve_device(None), recurse=False)
    return True


def check_alignment(
    module_name: str, plan: Plan, inp: torch.Tensor, features: Mapping[str, int], *weights: torch.Tensor
) -> None:
    """Raise a ValueError unless all GEMM dimensions suit the kernels of the plan's recipe.

    Rows are contracted in the gradient of a weight alone: where there will be none, fewer need to fit.

    Args:
        features: of the module that the plan was made for; they never change, so that the plan may note what fits.
        weights: of the call's products.
    """
    shape = inp.shape
    # A graph knows no checkpoint regions, and must not depend on what other calls have noted.
    compiling = torch.compiler.is_compiling()
    differentiated = torch.is_grad_enabled() if compiling else trains()
    trained = differentiated and any(weight.requires_grad for weight in weights)
    if not compiling and plan.aligned == (shape, trained):
        return
    recipe, alignment = plan.recipe, plan.casts.alignment
    of_rows = alignment if trained else plan.casts.row_alignment
    rows = inp.numel() // shape[-1] if shape[-1] else 0
    if rows % of_rows:
        where = "" if trained or of_rows == alignment else " where no weight takes a gradient"
        raise ValueError(
            f"{module_name}: under {type(recipe).__name__} the number of rows of inp (all dimensions but the last) "
            f"must be divisible by {of_rows}{where}, got {rows}; te_dispatch.pytorch.Fp8Padding pads rows"
        )
    for dimension, size in features.items():
        if size % alignment:
            raise ValueError(
                f"{module_name}: under {type(recipe).__name__} {dimension} must be divisible by {alignment}, got {size}"
            )
    if not compiling:
        plan.aligned = (tuple(shape), trained)


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
    weights = [f"{name}_weight" if name else "weight" for name in sizes]
    biases = [] if bias is None else [f"{name}_bias" if name else "bias" for name in sizes]
    rows = list(sizes.values())
    # All weights, then all biases: optimizers and their checkpoints number parameters in this order.
    for names, whole in ((weights, weight), (biases, bias)):
        for name, part in zip(names, () if whole is None else whole.split(rows)):
            module.register_parameter(name, torch.nn.Parameter(part))
    return weights, biases


def lay_together(module: torch.nn.Module, names: Sequence[str]) -> None:
    """Have the parameters `names` of a module lie one after the other in one memory, as `Rows` reads them in place."""
    parts = [parameter(module, name) for name in names]
    if len(parts) > 1 and all(type(part) in PLAIN for part in parts):
        whole = torch.cat([part.detach() for part in parts])
        for part, rows in zip(parts, whole.split([part.shape[0] for part in parts])):
            part.data = rows


def parameter(module: torch.nn.Module, name: str) -> torch.Tensor:
    """A parameter of a module, or what a parametrization computes for it."""
    # Past Module.__getattr__, which costs half a microsecond; a parametrized module lacks the entry.
    found = module._parameters.get(name)
    return found if found is not None else getattr(module, name)  # type: ignore[no-any-return]


def joined(module: torch.nn.Module, names: Sequence[str]) -> torch.Tensor | None:
    """The parameters `names` of a module as one tensor, with gradients; None where there are no names."""
    if not names:
        return None
    if len(names) == 1:
        return parameter(module, names[0])
    return torch.cat([parameter(module, name) for name in names])


class Rows:
    """A tensor that several parameters are the rows of, as one tensor without gradient.

    It is kept, because it takes as long to make as a product: as long as each parameter is the tensor that it was made
    of, at the address, and of the shape and dtype, that it had then. What is kept holds that memory, so that nothing
    else can come to lie there.

    Attributes:
        names: of the parameters.
        rows: of each, as `whole` last saw them.
    """

    __slots__ = ("names", "rows", "_whole", "_parts", "_marks")

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.rows: tuple[int, ...] = ()
        self.forget()

    def forget(self) -> None:
        """Let go of the memory."""
        self._whole: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self._marks: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.names,)

    def parts(self, module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
        return tuple([parameter(module, name) for name in self.names])

    def whole(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """One tensor of the parts; a copy unless they lie one after the other."""
        if parts and self._whole is not None:
            for part, known, (address, shape, dtype) in zip(parts, self._parts, self._marks):
                if (
                    part is not known
                    or part.data_ptr() != address
                    or part.shape != shape
                    or part.dtype is not dtype
                    or not part.is_contiguous()
                ):
                    break
            else:
                return self._whole
        self.rows = tuple([part.shape[0] for part in parts])
        # It outlives the call: a mode that makes a graph must not record it, nor make a fake tensor of it.
        # A tensor born in inference mode could not be saved for a backward.
        with outside_modes() if dispatch_modes() else nullcontext(), torch.inference_mode(False), torch.no_grad():
            whole = _alias(parts)
        if whole is None:
            self.forget()
            with torch.no_grad():
                return torch.cat(parts)
        self._whole, self._parts = whole, parts
        self._marks = tuple((part.data_ptr(), part.shape, part.dtype) for part in parts)
        return whole


def _alias(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view of all parts, None where they do not lie one after the other in one storage."""
    first = parts[0]
    end, storage = first.data_ptr(), first.untyped_storage()
    for part in parts:
        if part.dtype != first.dtype or part.data_ptr() != end or not part.is_contiguous():
            return None
        if part.untyped_storage().data_ptr() != storage.data_ptr():
            return None
        end += part.numel() * part.element_size()
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    whole = torch.empty(0, dtype=first.dtype, device=first.device)
    return whole.set_(storage, first.storage_offset(), shape, first.stride())


class SplitParameters:
    """Weights and biases of a module whose weight is several parameters.

    Its Function takes them behind its other arguments, weights first, for the sake of their gradients, and computes
    with the whole ones.
    """

    __slots__ = ("weights", "biases")

    def __init__(self, weight_names: Sequence[str], bias_names: Sequence[str]) -> None:
        self.weights = Rows(weight_names)
        self.biases = Rows(bias_names)

    def forget(self) -> None:
        self.weights.forget()
        self.biases.forget()

    def whole(
        self, module: torch.nn.Module, with_bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]:
        """(weight, bias, parts): the first two without gradient, and what the Function takes beside them.

        While compiling, and where a parameter is of a class of its own, there are no parts, and gradients run through
        a concatenation.
        """
        weights, biases = self.weights.parts(module), self.biases.parts(module) if with_bias else ()
        parts = weights + biases
        if torch.compiler.is_compiling() or not all(type(part) in PLAIN for part in parts):
            return torch.cat(weights), torch.cat(biases) if biases else None, ()
        return self.weights.whole(weights), self.biases.whole(biases) if biases else None, parts


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
