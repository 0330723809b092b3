# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What Triton tells calls of one kernel apart by: each argument's type, whether it is a multiple of 16, whether an
integer is 1 (which becomes a constant) or wider than 32 bits, and on AMD whether 32 bits reach all of a tensor.

A reader looks at a call's arguments at once. It is generated for the classes of its arguments, because a loop over them
would take longer than Triton's launcher.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch_triton.descriptor import Descriptor

#: Arguments -> (what Triton specializes on, arguments as its launcher takes them: tensors by address).
Reader = Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]
#: Readers by their arguments' classes.
READERS: dict[tuple[type, ...], Reader] = {}
AMD = torch.version.hip is not None


def reader_of(classes: tuple[type, ...], amd: bool = AMD) -> Reader:
    """The reader of arguments of some classes."""
    names = [f"x{i}" for i in range(len(classes))]
    read, facts, values = [], [], []
    for name, kind in zip(names, classes):
        value = name
        if kind is int:
            facts.append(f"({name} == 1) | ({name} & 15 == 0) << 1 | (-0x80000000 <= {name} < 0x80000000) << 2")
        elif kind is tuple:  # integers that all need 64 bits
            facts.append(f"len({name})")
        elif kind is Descriptor:
            facts.append(f"{name}.dtype, {name}.block_shape")
        elif kind is not float and kind is not type(None):
            value = f"p{name}"
            read.append(f"    {value} = {name}.data_ptr()")
            facts.append(f"{name}.dtype, {value} & 15 == 0" + (f", in_reach({name})" if amd else ""))
        values.append(value)
    code = "\n".join(
        [
            f"def read({', '.join(names)}):", *read,
            f"    return ({''.join(f'{fact}, ' for fact in facts)}), ({''.join(f'{value}, ' for value in values)})",
        ]
    )  # fmt: skip
    file = f"<te_dispatch_triton reader of {', '.join(kind.__name__ for kind in classes)}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"in_reach": in_reach}
    exec(compile(code, file, "exec"), namespace)
    reader: Reader = namespace["read"]
    return reader


def in_reach(x: Any) -> bool:
    """Whether 32 bits reach all of a tensor's memory, which Triton's AMD compiler makes use of."""
    return bool(x.untyped_storage().size() < 2**31)
