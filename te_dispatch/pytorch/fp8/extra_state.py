# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``_extra_state`` of checkpoints: delayed-scaling states as one tensor of bytes, and Transformer Engine's.

A module's entry is a uint8 tensor of one dimension on the CPU: empty where there is nothing to save, else a document in
the safetensors format (https://github.com/huggingface/safetensors#format): 8 bytes with the length of a JSON header,
the header, padded with spaces, then the data of tensors, all little-endian. Every reader of that format reads it, and
none has to run code of the file's. The header's ``__metadata__`` holds

====================  ============================================================
``format``            ``te_dispatch.extra_state``
``version``           ``2``
``<state>``           JSON: ``max_values`` and ``margin`` of a state
====================  ============================================================

and its tensors are ``<state>.amax_history`` (length, count), ``<state>.scale`` and ``<state>.scale_amax`` (count,), all
float32, for each of the states ``forward``, ``backward``, ``output`` and ``input_grad`` that the module has
(`DelayedScales`). Version 1 was a dict of the same tensors.

Transformer Engine's entries are read by `te_dispatch.pytorch.fp8.transformer_engine_state`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from te_dispatch.pytorch.fp8.delayed_scales import StateError

#: By name, what `DelayedScales.as_data` gives.
States = dict[str, dict[str, Any]]

_FORMAT, _VERSION = "te_dispatch.extra_state", "2"
_TENSORS = ("amax_history", "scale", "scale_amax")
#: What the length of a header and the header are padded to a multiple of: states of equal shapes have equal sizes,
#: whatever numbers are in them, so that an entry that was made for one can take the other's data.
_ROOM = 2048
#: More than a header can need: a length beyond it is that of something else.
_LONGEST_HEADER = 1 << 20


def encoded(states: States) -> torch.Tensor:
    """States as bytes; equal states give equal bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": _FORMAT, "version": _VERSION}}
    data: list[torch.Tensor] = []
    start = 0
    for state, parts in states.items():
        options = {name: value for name, value in parts.items() if name not in _TENSORS}
        header["__metadata__"][state] = json.dumps(options)
        for name in _TENSORS:
            tensor = parts[name].detach().to("cpu", torch.float32).contiguous()
            data.append(tensor.flatten().view(torch.uint8))
            stop = start + data[-1].numel()
            header[f"{state}.{name}"] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, stop]}
            start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ROOM)
    front = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat((front, *data))


def decoded(entry: torch.Tensor, where: str) -> States:
    """The states in an entry of this project's.

    Raises:
        StateError: it is damaged, or of a later version; `where` starts the message.
    """
    entry = entry.detach().cpu()
    length = _length(entry)
    try:
        header = json.loads(as_bytes(entry[8 : 8 + length]))
        metadata = header.pop("__metadata__")
        version = metadata.pop("version")
        known = metadata.pop("format") == _FORMAT
    except (ValueError, KeyError, AttributeError, TypeError):
        raise StateError(f"{where} is no {_FORMAT}: its header cannot be read") from None
    if not known or version != _VERSION:
        raise StateError(f"{where} must be {_FORMAT} of version {_VERSION}, got version {version!r}")
    data, found = entry[8 + length :], {}
    try:
        for state, options in metadata.items():
            found[state] = dict(json.loads(options))
        for path, described in header.items():
            state, _, name = path.rpartition(".")
            found[state][name] = _tensor(described, data)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise StateError(f"{where} is damaged: {type(error).__name__}: {error}") from None
    return found


def _tensor(described: Mapping[str, Any], data: torch.Tensor) -> torch.Tensor:
    start, stop = described["data_offsets"]
    if described["dtype"] != "F32" or not 0 <= start <= stop <= len(data):
        raise ValueError(f"a tensor of {described['dtype']} at {start}..{stop} of {len(data)} bytes")
    return data[start:stop].clone().view(torch.float32).reshape(described["shape"])


def trimmed(entry: torch.Tensor) -> torch.Tensor:
    """The entry at the start of `entry`, which has zeros behind it; an empty one where there are zeros only.

    Neither a length of a header nor a pickle begins with a zero.
    """
    if not entry[:1].any():
        return entry[:0]
    if is_ours(entry):
        start = 8 + _length(entry)
        try:
            header = json.loads(as_bytes(entry[8:start]))
            ends = [part["data_offsets"][1] for name, part in header.items() if name != "__metadata__"]
            return entry[: start + max(ends)]
        except (ValueError, KeyError, TypeError, AttributeError):
            return entry  # damaged: `decoded` says how
    used = entry.nonzero()  # a pickle ends with the code that stops it, which is none
    return entry[: int(used[-1]) + 1]


def is_ours(entry: torch.Tensor) -> bool:
    """Whether an entry is a document of this project's, damaged or not, rather than a pickle."""
    return as_bytes(entry[8:9]) == b"{" and _length(entry) <= _LONGEST_HEADER


def _length(entry: torch.Tensor) -> int:
    """Of the header."""
    return int.from_bytes(as_bytes(entry[:8]), "little")


def as_bytes(part: torch.Tensor) -> bytes:
    """Those of a uint8 tensor."""
    # Not through NumPy, which PyTorch does without.
    return bytes(part.tolist())
