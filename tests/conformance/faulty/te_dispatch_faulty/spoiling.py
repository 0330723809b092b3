# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the tables of faults are made of: conditions on a call, and what is done to it or to its results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.conformance.transfer import mapped
from te_dispatch.numerics.quantized import Quantized
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault

#: What a spoiled implementation does with a call.
Behaviour = Callable[[Call], Any]
Condition = Callable[[Call], bool]
#: Some of a tensor's elements, as a view of it with its leading dimensions flattened.
Part = Callable[[torch.Tensor], torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]


def table(
    operator: str,
    entries: Mapping[str, tuple[str, Behaviour]],
    *,
    on: str = "",
    also: str = "",
    isolated: bool = False,
) -> tuple[Fault, ...]:
    """Faults of one operator, name -> (what is wrong, what it does).

    Args:
        on: the implementation; without a backend it is `faulty`'s, and without a name that of the operator's name.
        also, isolated: see `Fault`.
    """
    candidate = on if "." in on else f"faulty.{on or operator}"
    return tuple(
        Fault(name, operator, candidate, wrong, behave, isolated=isolated, also=also)
        for name, (wrong, behave) in entries.items()
    )


def always(call: Call) -> bool:
    return True


def where(*conditions: Condition) -> Condition:
    """All of them hold."""
    return lambda call: all(condition(call) for condition in conditions)


def given(**wanted: Any) -> Condition:
    """Arguments have these values; a tuple is any of several, `Ellipsis` any that is not None."""

    def holds(call: Call) -> bool:
        for name, value in wanted.items():
            got = call[name]
            if value is Ellipsis:
                if got is None:
                    return False
            elif got not in (value if isinstance(value, tuple) else (value,)):
                return False
        return True

    return holds


def operand(call: Call, name: str) -> torch.Tensor | None:
    """A tensor argument, None where it is left out or quantized."""
    found = call.get(name)
    return found if isinstance(found, torch.Tensor) else None


def of_dtype(name: str, *dtypes: torch.dtype) -> Condition:
    """An operand has one of these dtypes (its nominal one where it is quantized)."""
    return lambda call: getattr(call[name], "dtype", None) in dtypes


def with_members(x: Quantized, **members: Any) -> Quantized:
    """A record with other members."""
    return Quantized(**{**{name: getattr(x, name) for name in x.__slots__}, **members})


def rows_of(tensor: torch.Tensor) -> int:
    return tensor.numel() // tensor.shape[-1] if tensor.ndim and tensor.shape[-1] else 0


def lengths_of(call: Call) -> tuple[int, int]:
    """Queries and keys of a sequence of dense attention."""
    axis = 0 if call["layout"] == "sbhd" else 1
    return call["q"].shape[axis], call["k"].shape[axis]


def rows(name: str, more_than: int) -> Condition:
    return lambda call: rows_of(call[name]) > more_than


def columns(name: str, more_than: int) -> Condition:
    return lambda call: bool(call[name].ndim) and call[name].shape[-1] > more_than


def when(condition: Condition, behave: Behaviour) -> Behaviour:
    """Wrong where a condition holds, and right elsewhere."""
    return lambda call: behave(call) if condition(call) else call.sound()


def changing(**changes: Callable[[Call], Any]) -> Behaviour:
    """The sound implementation, given other arguments."""
    return lambda call: call.sound(**{name: change(call) for name, change in changes.items()})


def with_(**values: Any) -> Behaviour:
    """The sound implementation, given other values for some arguments."""
    return lambda call: call.sound(**values)


def all_of(flat: torch.Tensor) -> torch.Tensor:
    return flat


def rows_from(first: int) -> Part:
    return lambda flat: flat[first:]


def columns_from(first: int) -> Part:
    return lambda flat: flat[:, first:]


def elements_from(first: int) -> Part:
    return lambda flat: flat.view(-1)[first:]


def last_row(flat: torch.Tensor) -> torch.Tensor:
    return flat[-1:]


def first_element(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(-1)[:1]


def off(values: torch.Tensor) -> torch.Tensor:
    """Halves, or other codes."""
    return values * 0.5 if values.is_floating_point() else values ^ 1


def zero(values: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(values)


def finite(values: torch.Tensor) -> torch.Tensor:
    """0 instead of NaN, large numbers instead of Inf."""
    return torch.nan_to_num(values)


def nan_lost(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isnan(), torch.zeros_like(values), values)


def truncated(values: torch.Tensor) -> torch.Tensor:
    """One unit in the last place nearer to zero, as where bits are cut off; of 16-bit results."""
    if values.dtype not in (torch.bfloat16, torch.float16):
        return values
    bits = values.view(torch.int16)
    return torch.where(values.isfinite() & (values != 0), bits - 1, bits).view(values.dtype)


def spoil(tensor: torch.Tensor, part: Part = all_of, change: Change = off) -> None:
    """Change a part of a tensor in place, whatever its strides."""
    if not tensor.numel():
        return
    with torch.no_grad():
        flat = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
        flat = flat.clone(memory_format=torch.contiguous_format)
        piece = part(flat)
        if piece.numel():
            piece.copy_(change(piece))
            tensor.detach().copy_(flat.view(tensor.shape))


def member(made: Any, path: str) -> torch.Tensor | None:
    """A tensor among results: ``dx``, ``out.row_data``, or nothing for the result itself."""
    for name in path.split(".") if path else ():
        made = getattr(made, name, None)
    return made if isinstance(made, torch.Tensor) else None


def spoiled(path: str = "", part: Part = all_of, change: Change = off, on: Condition = always) -> Behaviour:
    """A part of a result is changed, where a condition holds."""

    def behave(call: Call) -> Any:
        hold = on(call)  # before the call: it may write to what the condition reads
        made = call.sound()
        found = member(made, path)
        if hold and found is not None:
            spoil(found, part, change)
        return made

    return behave


def expanded(x: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape))


def transposed(x: torch.Tensor) -> bool:
    return not expanded(x) and x.ndim > 1 and x.shape[-1] > 1 and x.stride(-1) != 1


def gapped(x: torch.Tensor) -> bool:
    return not expanded(x) and not transposed(x) and not x.is_contiguous()


def misaligned(x: torch.Tensor) -> bool:
    return x.numel() > 1 and x.data_ptr() % 16 != 0


def without_graph(behave: Callable[..., Any]) -> Callable[..., Any]:
    """What the fault itself computes is part of no graph."""
    return torch.no_grad()(behave)


def as_dense(x: torch.Tensor) -> torch.Tensor:
    """What one reads who takes memory for contiguous."""
    size = x.untyped_storage().nbytes() // x.element_size()
    whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), 0, (size,), (1,))
    places = (x.storage_offset() + torch.arange(x.numel(), device=x.device)) % max(size, 1)
    return whole[places].view(x.shape)


def _from_boundary(x: torch.Tensor) -> torch.Tensor:
    """What one reads who rounds the address down to a vector's."""
    before = x.data_ptr() % 16 // x.element_size()
    return x.detach().reshape(-1).roll(before).view(x.shape)


def misread(name: str, shape: Callable[[torch.Tensor], bool]) -> Behaviour:
    """An operand is read wrongly where it lies in memory in one way, `expanded` say."""
    read = _from_boundary if shape is misaligned else as_dense

    def behave(call: Call) -> Any:
        x = operand(call, name)
        if x is None or not x.numel() or not shape(x):
            return call.sound()
        with torch.no_grad():
            return call.sound(**{name: read(x.detach())})

    return behave


class Memory:
    """What a fault keeps between calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.kept: dict[Any, Any] = {}


def remembering(behave: Callable[[Call, Memory], Any]) -> Behaviour:
    """A fault with state of its own."""
    memory = Memory()

    def remembered(call: Call) -> Any:
        memory.calls += 1
        return behave(call, memory)

    return functools.update_wrapper(remembered, behave)  # type: ignore[return-value]


def keyed(key: Callable[[Call], Any]) -> Behaviour:
    """Gives the first result of a key again."""

    def behave(call: Call, memory: Memory) -> Any:
        made = call.sound()
        at = key(call)
        if at not in memory.kept:
            memory.kept[at] = mapped(made, lambda tensor: tensor.detach().clone())
            return made
        return call.delivered(memory.kept[at])

    return remembering(behave)
