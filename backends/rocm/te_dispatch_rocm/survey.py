# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The program that looks at AMD's devices in a process of its own (`te_dispatch_rocm.devices`): creating a handle of
hipBLASLt ends the process where there is no device, and may where a driver is broken.

    python survey.py HIP HIPBLASLT FIRST

The files of both libraries, and the first device of which a handle is created. Prints a JSON object a line, as soon as
it is known: the number of devices or HIP's error, then each device, then what came of its handle. Imports nothing but
the standard library.
"""

from __future__ import annotations

import ctypes
import json
import sys

#: Of hipDeviceProp_tR0600, which HIP keeps since its release 6: bytes, and where its members lie.
PROPERTIES_SIZE = 1472
NAME, MEMORY, ARCH = 0, 288, 1160
_TEXT = 256
_NO_DEVICE = 100


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main(hip_path: str, hipblaslt_path: str, first: int) -> None:
    hip = ctypes.CDLL(hip_path, mode=ctypes.RTLD_GLOBAL)
    count = ctypes.c_int()
    error = hip.hipGetDeviceCount(ctypes.byref(count))
    if error not in (0, _NO_DEVICE):
        hip.hipGetErrorString.restype = ctypes.c_char_p
        text = hip.hipGetErrorString(error)
        say(error=f"hipGetDeviceCount: {text.decode() if text else 'error'} ({error})")
        return
    say(count=0 if error else count.value)
    if error:
        return
    for index in range(count.value):
        # Longer than the structure is: a newer runtime may have added members.
        properties = ctypes.create_string_buffer(2 * PROPERTIES_SIZE)
        error = hip.hipGetDevicePropertiesR0600(properties, index)
        if error:
            say(device=index, error=f"hipGetDeviceProperties: error {error}")
            continue
        memory = ctypes.c_size_t.from_buffer(properties, MEMORY).value
        say(device=index, name=_text(properties, NAME), arch=_text(properties, ARCH), memory=memory)
    lt = ctypes.CDLL(hipblaslt_path)
    for index in range(first, count.value):
        handle, version = ctypes.c_void_p(), ctypes.c_int()
        status = hip.hipSetDevice(index) or lt.hipblasLtCreate(ctypes.byref(handle))
        if status:
            say(handle=index, error=f"hipblasLtCreate: status {status}")
            continue
        if lt.hipblasLtGetVersion(handle, ctypes.byref(version)):
            version.value = 0
        lt.hipblasLtDestroy(handle)
        say(handle=index, version=version.value)


def _text(properties: ctypes.Array[ctypes.c_char], at: int) -> str:
    return properties.raw[at : at + _TEXT].partition(b"\0")[0].decode(errors="replace")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
