# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the host library answers where tests choose it, and what it refuses."""

from __future__ import annotations

import ctypes
import sys
from ctypes import byref, c_float, c_int, c_size_t, c_void_p

import numpy as np
import pytest

NO_DEVICE, INVALID_DEVICE, INVALID_HANDLE = 100, 101, 400


def count(lt) -> tuple[int, int]:
    found = c_int(-1)
    return lt.library.hip.hipGetDeviceCount(byref(found)), found.value


def architecture(lt, device: int) -> str:
    properties = ctypes.create_string_buffer(1472)
    assert lt.library.hip.hipGetDevicePropertiesR0600(properties, device) == 0
    return properties.raw[1160:1416].split(b"\0")[0].decode()


def product(lt, d=None, n=8, **attributes):
    """A product of 8 x 8 matrices of fp32, and what keeps its operands."""
    a, b = np.ones((8, 8), np.float32), np.ones((8, n), np.float32)
    d = np.zeros((8, n), np.float32) if d is None else d
    matrices = [lt.Matrix(lt.R_32F, 8, x.shape[1], x.ctypes.data) for x in (a, b, d)]
    return lt.Product(*matrices, attributes), (a, b, d)


def algorithms(lt, of, **options):
    library = lt.library
    handle, desc = library.handle(), library.desc(of)
    layouts = [library.layout(x) for x in (of.a, of.b, of.d, of.d)]
    return library.algorithms(handle, desc, layouts, **options)


def run(lt, algorithm, of, workspace=None, size=0, handle=None, stream=None):
    """hipblasLtMatmul's status."""
    library = lt.library
    a, b, d = (library.layout(x) for x in (of.a, of.b, of.d))
    one, zero = c_float(1), c_float(0)
    return library.lt.hipblasLtMatmul(
        handle or library.handle(), library.desc(of), byref(one), c_void_p(of.a.data), a, c_void_p(of.b.data), b,
        byref(zero), c_void_p(of.d.data), d, c_void_p(of.d.data), d, byref(algorithm), workspace, c_size_t(size),
        stream,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "chips"),
    [
        ({}, ["gfx942"]),
        ({"HOST_HIP_DEVICES": "gfx942,gfx950,gfx1201"}, ["gfx942", "gfx950", "gfx1201"]),
        ({"HOST_HIP_DEVICES": "gfx942,gfx950", "HIP_VISIBLE_DEVICES": "1"}, ["gfx950"]),
        ({"HOST_HIP_DEVICES": "gfx942,gfx950", "HIP_VISIBLE_DEVICES": "1,0"}, ["gfx950", "gfx942"]),
        ({"HOST_HIP_DEVICES": "gfx942,gfx950", "HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "0"}, ["gfx942"]),
        ({"HOST_HIP_DEVICES": "gfx942", "HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HOST_HIP_DEVICES": ""}, []),
    ],
)
def test_devices(lt, monkeypatch, variables, chips):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert count(lt) == (0 if chips else NO_DEVICE, len(chips))
    assert [architecture(lt, i) for i in range(len(chips))] == [f"{chip}:sramecc+:xnack-" for chip in chips]
    assert lt.library.hip.hipSetDevice(len(chips)) == (INVALID_DEVICE if chips else NO_DEVICE)


def test_versions(lt, monkeypatch):
    monkeypatch.setenv("HOST_HIP_VERSION", "60443483")
    monkeypatch.setenv("HOST_HIPBLASLT_VERSION", "1500")
    hip, lt_version = c_int(), c_int()
    assert lt.library.hip.hipRuntimeGetVersion(byref(hip)) == 0
    lt.library.call("hipblasLtGetVersion", lt.library.handle(), byref(lt_version))
    assert (hip.value, lt_version.value) == (60443483, 1500)


def test_a_handle_without_a_device_ends_the_process(lt, folder, run):
    library = str(folder / "libhipblaslt.so.1")
    code = f"import ctypes; ctypes.CDLL({library!r}).hipblasLtCreate(ctypes.byref(ctypes.c_void_p())); print('lives')"
    done = run([sys.executable, "-c", code], HOST_HIP_DEVICES="")
    assert (done.returncode, done.stdout) == (1, "")
    assert "lives" in run([sys.executable, "-c", code], HOST_HIP_DEVICES="gfx950").stdout


def test_streams_events_and_memory(lt):
    hip = lt.library.hip
    stream, start, stop, block, elapsed = c_void_p(), c_void_p(), c_void_p(), c_void_p(), c_float(-1)
    assert hip.hipStreamCreateWithFlags(byref(stream), 1) == 0
    assert hip.hipEventCreate(byref(start)) == hip.hipEventCreateWithFlags(byref(stop), 0) == 0
    assert hip.hipMalloc(byref(block), c_size_t(64)) == 0
    assert hip.hipEventRecord(start, stream) == 0
    source, back = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    assert hip.hipMemcpyAsync(block, c_void_p(source.ctypes.data), c_size_t(64), 1, stream) == 0
    assert hip.hipMemcpyAsync(c_void_p(back.ctypes.data), block, c_size_t(64), 2, stream) == 0
    np.testing.assert_array_equal(back, source)
    assert hip.hipMemsetAsync(block, 0, c_size_t(64), stream) == 0
    assert hip.hipEventElapsedTime(byref(elapsed), start, stop) == INVALID_HANDLE  # stop was not recorded
    assert hip.hipEventRecord(stop, stream) == hip.hipEventSynchronize(stop) == 0
    assert hip.hipEventElapsedTime(byref(elapsed), start, stop) == 0
    assert elapsed.value >= 0
    of, _kept = product(lt)
    (algorithm, *_) = algorithms(lt, of)
    assert run(lt, algorithm.algorithm, of, stream=stream) == lt.SUCCESS
    assert (
        hip.hipFree(block)
        == hip.hipStreamDestroy(stream)
        == hip.hipEventDestroy(start)
        == hip.hipEventDestroy(stop)
        == 0
    )
    assert hip.hipFree(block) == 1
    assert hip.hipStreamSynchronize(stream) == INVALID_HANDLE
    assert run(lt, algorithm.algorithm, of, stream=stream) == lt.EXECUTION_FAILED


def test_workspace_limits_the_algorithms(lt):
    of, kept = product(lt)
    found = algorithms(lt, of)
    assert [one.workspace for one in found] == [0, 256, 512]
    assert len({bytes(one.algorithm.data[:4]) for one in found}) == 3
    assert [one.workspace for one in algorithms(lt, of, workspace=300)] == [0, 256]
    assert len(algorithms(lt, of, count=1)) == 1
    workspace = (ctypes.c_uint8 * 256)()
    assert run(lt, found[1].algorithm, of, workspace, 255) == lt.INVALID_VALUE
    assert run(lt, found[1].algorithm, of, None, 256) == lt.INVALID_VALUE
    assert not kept[2].any()
    assert run(lt, found[1].algorithm, of, workspace, 256) == lt.SUCCESS
    assert bytes(workspace) == b"\xa5" * 256
    np.testing.assert_array_equal(kept[2], np.full((8, 8), 8, np.float32))


def test_an_algorithm_of_another_kind_of_product_is_refused(lt):
    of, _kept = product(lt)
    bias = np.ones(8, np.float32)
    other, _other_kept = product(lt, epilogue=lt.BIAS, bias=bias.ctypes.data)
    assert run(lt, algorithms(lt, of)[0].algorithm, other) == lt.INVALID_VALUE
    assert run(lt, algorithms(lt, other)[0].algorithm, other) == lt.SUCCESS
    assert run(lt, lt.Algorithm(), of) == lt.INVALID_VALUE


def test_the_handle_s_device_has_to_be_current(lt, monkeypatch):
    monkeypatch.setenv("HOST_HIP_DEVICES", "gfx942,gfx950")
    of, _kept = product(lt)
    handle, algorithm = lt.library.handle(), algorithms(lt, of)[0].algorithm
    try:
        assert lt.library.hip.hipSetDevice(1) == 0
        assert run(lt, algorithm, of, handle=handle) == lt.EXECUTION_FAILED
        assert run(lt, algorithm, of) == lt.SUCCESS
    finally:
        assert lt.library.hip.hipSetDevice(0) == 0
    assert run(lt, algorithm, of, handle=handle) == lt.SUCCESS


@pytest.mark.parametrize(
    ("word", "attributes"),
    [("all", {}), ("bias", {"epilogue": 4, "bias": 4096}), ("gelu", {"epilogue": 32}), ("tf32", {})],
)
def test_products_can_be_refused(lt, monkeypatch, tmp_path, word, attributes):
    of, kept = product(lt, **attributes)
    of.compute = lt.COMPUTE_TF32 if word == "tf32" else lt.COMPUTE_32F
    algorithm = algorithms(lt, of)[0].algorithm
    log = tmp_path / "log"
    monkeypatch.setenv("HOST_HIPBLASLT_REFUSE", f"mx,{word}")
    monkeypatch.setenv("HOST_HIPBLASLT_LOG", str(log))
    assert algorithms(lt, of) == []
    assert run(lt, algorithm, of) == lt.INTERNAL_ERROR
    assert log.read_text() == f"no algorithm: HOST_HIPBLASLT_REFUSE has {word}\n"
    assert not kept[2].any()
    other, _ = product(lt)
    if word != "all":
        assert algorithms(lt, other)


def test_products_can_fail(lt, monkeypatch):
    of, kept = product(lt)
    algorithm = algorithms(lt, of)[0].algorithm
    monkeypatch.setenv("HOST_HIPBLASLT_FAIL", "1")
    assert run(lt, algorithm, of) == lt.EXECUTION_FAILED
    assert not kept[2].any()


def test_products_are_logged(lt, monkeypatch, tmp_path):
    of, _kept = product(lt)
    algorithm = algorithms(lt, of)[0].algorithm
    log = tmp_path / "log"
    monkeypatch.setenv("HOST_HIPBLASLT_LOG", str(log))
    assert run(lt, algorithm, of) == lt.SUCCESS
    facts = dict(word.split("=") for word in log.read_text().split())
    assert {name: facts[name] for name in ("arch", "m", "n", "k", "epilogue", "algorithm")} == {
        "arch": "gfx942", "m": "8", "n": "8", "k": "8", "epilogue": "1", "algorithm": "4711",
    }  # fmt: skip


@pytest.mark.parametrize("attributes", [{"epilogue": 160}, {"epilogue": 160, "aux": 4096, "aux_ld": 7}])
def test_descriptors_that_contradict_each_other_are_refused(lt, attributes):
    of, _kept = product(lt, **attributes)
    with pytest.raises(lt.Refused) as error:
        algorithms(lt, of)
    assert error.value.status == lt.INVALID_VALUE


def test_matrices_that_do_not_fit_are_refused(lt):
    for name, change in (("a", {"rows": 9, "ld": 9}), ("b", {"columns": 9}), ("d", {"ld": 7}), ("d", {"rows": 7})):
        of, _kept = product(lt)
        for attribute, value in change.items():
            setattr(getattr(of, name), attribute, value)
        with pytest.raises(lt.Refused) as error:
            algorithms(lt, of)
        assert error.value.status == lt.INVALID_VALUE


def test_an_empty_result_is_no_work(lt):
    of, _kept = product(lt, n=0)
    of.b.ld = of.d.ld = 8
    assert algorithms(lt, of) == []
    assert run(lt, lt.Algorithm(), of) == lt.SUCCESS


#: Types of A, B and D, and whether a chip has an algorithm.
MATRIX_UNITS = [
    ("gfx942", (1000, 1001, 14), True),
    ("gfx942", (28, 28, 14), False),
    ("gfx942", (1000, 28, 14), False),
    ("gfx950", (28, 29, 14), True),
    ("gfx950", (1000, 1000, 14), False),
    ("gfx90a", (28, 28, 14), False),
    ("gfx90a", (1000, 1000, 14), False),
    ("gfx1100", (28, 28, 14), False),
    ("gfx1201", (29, 28, 2), True),
    ("gfx942", (1000, 14, 14), False),
    ("gfx942", (14, 2, 0), False),
    ("gfx942", (14, 14, 1000), False),
]


@pytest.mark.parametrize(("chip", "types", "has"), MATRIX_UNITS)
def test_types_that_a_chip_multiplies(lt, monkeypatch, chip, types, has):
    monkeypatch.setenv("HOST_HIP_DEVICES", chip)
    of, _kept = product(lt)
    of.a.type, of.b.type, of.d.type = types
    assert bool(algorithms(lt, of)) == has


def test_blocks_with_scales_are_of_gfx950_in_multiples_of_32(lt, monkeypatch):
    def found(chip, m=32, n=32, k=32, **changes):
        monkeypatch.setenv("HOST_HIP_DEVICES", chip)
        attributes = {"a_scale": 4096, "b_scale": 4096, "a_scale_mode": 2, "b_scale_mode": 2, **changes}
        matrices = (lt.Matrix(28, m, k, 0), lt.Matrix(28, k, n, 0), lt.Matrix(14, m, n, 0))
        return bool(algorithms(lt, lt.Product(*matrices, attributes)))

    assert found("gfx950")
    assert not found("gfx1201")
    assert not any(found("gfx950", **{size: 48}) for size in "mnk")
    assert not found("gfx950", b_scale_mode=0)
    assert not found("gfx950", a_scale=0)
