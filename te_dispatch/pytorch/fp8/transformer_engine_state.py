# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``_extra_state`` of Transformer Engine's checkpoints: delayed-scaling states, read without running what is in them.

With delayed scaling an entry is a pickle of a dict with scales, amax histories and the recipe. It is bytes in a uint8
tensor; earlier releases kept an `io.BytesIO` that `torch.save` wrote, a zip archive with a pickle in it. One unpickler
reads both. It makes tensors and nothing else: whatever else a pickle names is neither imported nor called, and
`_Unknown` stands for it. That is accepted in the recipe only, where a function may compute amaxes or scales, and the
recipe's class may be a user's.
"""

from __future__ import annotations

import io
import logging
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from te_dispatch.pytorch.fp8.delayed_scales import StateError
from te_dispatch.torch_private import rebuild_tensor

_log = logging.getLogger("te_dispatch")

_ZIP = b"PK\x03\x04"
#: What archives call the dtypes of their tensors.
_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
#: Names in recipes that were warned of.
_warned: set[str] = set()


class _Inert:
    """Stands for an object: keeps its attributes, and runs nothing."""

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.__dict__.update(part)

    def append(self, item: Any) -> None:
        """Items of a list's subclass; they are not kept."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of a dict's subclass; they are not kept."""


class _Recipe(_Inert):
    """Stands for a class of Transformer Engine's recipes and what they are made of."""


class _Unknown(_Inert):
    """Stands for a function or class of any other module. Each has a subclass of its own."""

    path: str


class _Maker:
    """A function that pickles may call. A pickle could set attributes of a plain function."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __setstate__(self, state: Any) -> NoReturn:
        raise TypeError("a pickle changes a function")


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    if isinstance(storage, torch.Tensor):  # of an archive
        return storage.as_strided(size, stride, offset)
    return rebuild_tensor(storage, offset, size, stride, *rest)


def _storage(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _Maker(_tensor),
    ("torch.storage", "_load_from_bytes"): _Maker(_storage),
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


class _Reader(pickle.Unpickler):
    """Makes tensors, and stand-ins for everything else.

    Args:
        pickled: the pickle.
        record: content of a tensor of the archive that the pickle is from, by its key.

    Attributes:
        unknown: path -> what stands for it.
    """

    def __init__(self, pickled: bytes, record: Callable[[str], bytes] | None = None) -> None:
        super().__init__(io.BytesIO(pickled))
        self._record = record
        self.unknown: dict[str, type[_Unknown]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "transformer_engine.common.recipe":
            return _Recipe
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        path = f"{module}.{name}"
        if path not in self.unknown:
            self.unknown[path] = type("_Unknown", (_Unknown,), {"path": path})
        return self.unknown[path]

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """All of a tensor's memory, as a vector on the CPU, wherever it was."""
        if self._record is None:
            raise pickle.UnpicklingError("a tensor that is in no archive")
        _, dtype, key, _, _ = pid
        content = self._record(key)
        return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _loaded(content: bytes) -> tuple[Any, list[str]]:
    """What an entry holds, and the names in it that are not known, all of them in the recipe.

    Raises:
        StateError: a name that is not known is elsewhere. Anything else where it is no pickle.
    """
    if content.startswith(_ZIP):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            root = next(name for name in names if name.endswith("/data.pkl")).removesuffix("data.pkl")
            order = archive.read(f"{root}byteorder").decode() if f"{root}byteorder" in names else "little"
            if order != sys.byteorder:
                raise ValueError(f"tensors are {order}-endian")
            reader = _Reader(archive.read(f"{root}data.pkl"), lambda key: archive.read(f"{root}data/{key}"))
            state = reader.load()
    else:
        reader = _Reader(content)
        state = reader.load()
    parts = {key: part for key, part in state.items() if key != "recipe"} if isinstance(state, dict) else state
    for found in _unknown(parts):
        raise StateError(f"names {found.path}, which no state of delayed scaling needs; it is not loaded")
    return state, list(reader.unknown)


def _unknown(part: Any) -> Iterator[type[_Unknown] | _Unknown]:
    """Stand-ins in lists, tuples and dicts. A damaged entry may hold itself."""
    seen, todo = set(), [part]
    while todo:
        part = todo.pop()
        if isinstance(part, _Unknown) or (isinstance(part, type) and issubclass(part, _Unknown)):
            yield part
        elif isinstance(part, (dict, list, tuple)) and id(part) not in seen:
            seen.add(id(part))
            todo += [*part, *part.values()] if isinstance(part, dict) else part


def of_transformer_engine(content: bytes, gemms: int, where: str) -> dict[str, dict[str, Any]]:
    """The forward and backward states of a module of `gemms` products that Transformer Engine saved.

    It keeps three tensors of a product in the forward (input, weight, output) and two in the backward (gradients of
    the output and of the input). Those of what is multiplied are taken; of what made a scale it saves nothing.

    Returns:
        By name, what `DelayedScales.as_data` gives; empty for a recipe without state.

    Raises:
        StateError: it cannot be read, or not without running code of its own; `where` starts the message.
    """
    try:
        state, unknown = _loaded(content)
    except StateError as error:
        raise StateError(f"{where} is a pickle that {error}") from None
    except Exception as error:
        raise StateError(
            f"{where} is neither te_dispatch.extra_state nor Transformer Engine's: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(state, dict):
        raise StateError(f"{where} must be a dict of Transformer Engine's, got {type(state).__name__}")
    if "scale_fwd" not in state:
        return {}
    options = state.get("extra_fp8_variables", {})
    margin = getattr(state.get("recipe"), "margin", 0)
    found: dict[str, dict[str, Any]] = {}
    for name, short, kept, of_each in (("forward", "fwd", (0, 1), 3), ("backward", "bwd", (0,), 2)):
        scale, history = state.get(f"scale_{short}"), state.get(f"amax_history_{short}")
        if not isinstance(scale, torch.Tensor) or not isinstance(history, torch.Tensor):
            raise StateError(f"{where} lacks scale_{short} or amax_history_{short}")
        if scale.shape != (of_each * gemms,) or history.dim() != 2 or history.shape[1] != of_each * gemms:
            raise StateError(
                f"{where}, scale_{short} must be ({of_each * gemms},), got shape {tuple(scale.shape)} with a history "
                f"of shape {tuple(history.shape)}"
            )
        columns = [of_each * gemm + part for gemm in range(gemms) for part in kept]
        largest = options.get(f"fp8_max_{short}")
        found[name] = {
            "amax_history": history[:, columns],
            "scale": scale[columns],
            "scale_amax": None,
            "max_values": [float(largest)] * len(columns) if isinstance(largest, (int, float)) else [],
            "margin": margin,
        }
    for path in unknown:
        if path not in _warned:
            _warned.add(path)
            _log.warning(
                "%s has a recipe that names %s, which is not loaded: scales and histories are, and the recipe of the "
                "autocast says how they are updated",
                where,
                path,
            )
    return found
