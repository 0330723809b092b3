# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What of this backend works here, and what is missing: the report for ``te-dispatch doctor``.

Answers on every machine: without a GPU, ROCm, PyTorch or the compiled module.
"""

from __future__ import annotations

import importlib.util

from te_dispatch_rocm import devices, libraries, native, probe
from te_dispatch_rocm.archs import ARCHS

Row = tuple[str, str, str]


def doctor() -> list[Row]:
    """(subject, state, reason) of the compiled module, PyTorch, the libraries and each visible device."""
    rows = [_compiled(), _pytorch()]  # imports torch, whose libraries the next rows then see
    for wanted, find in ((libraries.HIP, libraries.hip), (libraries.HIPBLASLT, libraries.hipblaslt)):
        library = find()
        if isinstance(library, str):
            return [*rows, (wanted.name, "missing", library)]  # the rest asks for this one
        known = f"{library.version_text}, " if library.version != (0, 0, 0) else ""
        rows.append((wanted.name, "ok", f"{known}{library.source}: {library.path}"))
    rows += [("libraries", "warning", problem) for problem in libraries.problems()]
    rows.append(("AITER", "ok" if probe.aiter_version()[0].isdigit() else "missing", probe.aiter_version()))
    return rows + device_rows(devices.found())


def device_rows(found: devices.Survey) -> list[Row]:
    """One of each device, or one that says why there is none."""
    if found.problem is not None:
        return [("devices", "missing", found.problem)]
    return [(f"device {index}", *served(device)) for index, device in enumerate(found.devices)]


def served(device: devices.Device) -> tuple[str, str]:
    """(state, reason) of a device."""
    named = f"{device.name}, {device.arch}"
    table = ARCHS["amd"].get(device.arch)
    if table is None:
        return "warning", f"{named}: this backend serves {', '.join(ARCHS['amd'])}"
    if device.hipblaslt != devices.READY:
        return "warning", f"{named}: {device.hipblaslt}"
    encodings = f"FP8 {' and '.join(table.encodings)}" if table.encodings else "no FP8"
    return "ok", f"{named}: hipBLASLt {device.version or 'of an unknown release'}, {encodings}"


def _compiled() -> Row:
    try:
        return ("compiled module", "ok", str(native.load().__file__))
    except ImportError as error:
        return ("compiled module", "missing", str(error))


def _pytorch() -> Row:
    if importlib.util.find_spec("torch") is None:
        return ("PyTorch", "missing", "not installed")
    import torch

    if torch.version.hip is None:
        return ("PyTorch", "missing", f"PyTorch {torch.__version__} is built for no AMD device")
    return ("PyTorch", "ok", f"PyTorch {torch.__version__}, ROCm {torch.version.hip}")
