# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""AMD's devices as HIP sees them: each with its chip, and whether hipBLASLt works on it.

Asked once, in a process of its own (`te_dispatch_rocm.survey`): devices are counted first, then told apart, and then a
handle of the library is created for each.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from te_dispatch_rocm import libraries, survey

#: The value of the fact ``device.hipblaslt`` where a handle was created; else it is why not.
READY = "ready"
#: Seconds for all devices: the first call into a driver may load firmware.
TIME_LIMIT = 120.0

#: What hides devices from HIP, which reads the first of them where it is empty, too, and takes the others as not set.
VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_DRIVER = "/dev/kfd"


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        arch: such as ``gfx942``, without the features that follow it.
        memory: bytes.
        hipblaslt: `READY`, or why hipBLASLt does not work on it.
        version: of hipBLASLt; empty where it is not known.
    """

    name: str
    arch: str
    memory: int
    hipblaslt: str = "not asked"
    version: str = ""


@dataclass(frozen=True)
class Survey:
    """What was found.

    Attributes:
        devices: by HIP's index.
        problem: why there are none; None where there are.
    """

    devices: tuple[Device, ...] = ()
    problem: str | None = None


@functools.cache
def found() -> Survey:
    """The devices of this process."""
    hip, hipblaslt = libraries.hip(), libraries.hipblaslt()
    if isinstance(hip, str):
        return Survey(problem=hip)
    if isinstance(hipblaslt, str):
        return Survey(problem=hipblaslt)
    return ask(hip.path, hipblaslt.path)


def ask(hip: str, hipblaslt: str, time_limit: float = TIME_LIMIT) -> Survey:
    """What HIP and hipBLASLt in these files say."""
    devices: dict[int, Device] = {}
    first = 0
    while True:
        said, ending = _run(hip, hipblaslt, first, time_limit)
        if "count" not in said.get(None, {}):
            return Survey(problem=said.get(None, {}).get("error") or f"counting AMD's devices {ending}")
        count = said[None]["count"]
        if count == 0:
            return Survey(problem=no_device(os.environ))
        for index in range(count):
            if index not in devices:
                devices[index] = _device(said.get(("device", index)), ending)
            if ("handle", index) in said:
                devices[index] = _with_handle(devices[index], said[("handle", index)], hipblaslt)
        asked = [index for index in range(first, count) if ("handle", index) in said]
        first = asked[-1] + 1 if asked else first
        if first >= count:
            break
        devices[first] = replace(devices[first], hipblaslt=f"hipblasLtCreate {ending}")
        first += 1
        if first >= count:
            break
    return Survey(tuple(devices[index] for index in sorted(devices)))


def _device(said: Mapping[str, Any] | None, ending: str) -> Device:
    if said is None or "error" in said:
        reason = said["error"] if said else f"asking for its properties {ending}"
        return Device("AMD device", "unknown", 0, reason)
    return Device(said["name"], said["arch"].partition(":")[0], said["memory"])


def _with_handle(device: Device, said: Mapping[str, Any], path: str) -> Device:
    if "error" in said:
        return replace(device, hipblaslt=said["error"])
    number = said["version"]
    version = number // 100_000, number // 100 % 1000, number % 100
    text = ".".join(map(str, version)) if number else ""
    return replace(device, version=text, hipblaslt=libraries.too_old("hipblaslt", version, path) or READY)


def _run(hip: str, hipblaslt: str, first: int, time_limit: float) -> tuple[dict[Any, dict[str, Any]], str]:
    """What one process said, by subject, and how it ended."""
    command = [sys.executable, "-I", "-S", survey.__file__, hip, hipblaslt, str(first)]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=time_limit, check=False)
        output, code = ended.stdout, ended.returncode
        words = ended.stderr.decode(errors="replace").strip().splitlines()
        ending = f"ended the process with exit code {code}" if code >= 0 else f"killed the process with signal {-code}"
        ending += f" ({words[-1][:200]})" if words else ""
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"did not answer within {time_limit:g} s"
    except OSError as error:
        output, ending = b"", f"was not possible: {error}"
    said: dict[Any, dict[str, Any]] = {}
    for line in output.decode(errors="replace").splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue  # what a library prints
        if isinstance(one, dict):
            said[next(((kind, one[kind]) for kind in ("device", "handle") if kind in one), None)] = one
    return said, ending


def no_device(environ: Mapping[str, str], driver: str = _DRIVER) -> str:
    """Why HIP may see no device, in one phrase."""
    hiding = [f"{name}={environ[name]!r}" for name in VISIBILITY if environ.get(name)]
    if environ.get(VISIBILITY[0]) == "":
        hiding.insert(0, f"{VISIBILITY[0]}=''")
    if hiding:
        names = "name" if len(hiding) > 1 else "names"
        return f"HIP sees no AMD device: {' and '.join(hiding)} {names} none that is here"
    if not os.path.exists(driver):
        return f"HIP sees no AMD device: there is no {driver}, so the driver amdgpu is not loaded"
    if not os.access(driver, os.R_OK | os.W_OK):
        return f"HIP sees no AMD device: {driver} may not be opened (groups render and video may)"
    return "HIP sees no AMD device"
