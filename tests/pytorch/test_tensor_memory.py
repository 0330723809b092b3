# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Functions about the memory of tensors, and about devices and dtypes that arguments leave open."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.pytorch import comparing, devices
from te_dispatch.pytorch.splitting import combine_tensors, split_and_copy
from te_dispatch.pytorch.tensor import memory
from te_dispatch.pytorch.tensor.kinds import clear_columnwise_cache, get_all_tensor_types


def quantized() -> te.QuantizedTensor:
    return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(torch.randn(32, 32))


# -- memory -------------------------------------------------------------------------------------------------------


def test_tensors_are_emptied() -> None:
    x, kept = torch.randn(4, 4), torch.randn(4)
    kept._do_not_clear = True
    held = [x]
    memory.clear_tensor_data(x, None, kept)
    assert held[0].numel() == 0 and held[0].dtype == torch.float32 and kept.numel() == 4
    y = torch.randn(4)
    with pytest.raises(TypeError, match="a QuantizedTensor cannot be emptied"):
        memory.clear_tensor_data(y, quantized())
    assert y.numel() == 4


def test_views_are_refused() -> None:
    x = torch.randn(4, 4)
    assert memory.assert_viewless_tensor(x) is x and memory.assert_viewless_tensor("x") == "x"
    memory.safely_set_viewless_tensor_data(x, torch.ones(2))
    assert torch.equal(x, torch.ones(2))
    with pytest.raises(ValueError, match=r"shape \(2,\) is a view of one of shape \(4,\).*\. More"):
        memory.assert_viewless_tensor([torch.randn(4)[:2]], "More")
    view = torch.randn(4)[:2]
    before = view.clone()
    with pytest.raises(ValueError, match=r"is a view .* The new data have shape \(3,\)"):
        memory.safely_set_viewless_tensor_data(view, torch.ones(3))
    assert torch.equal(view, before)


def test_a_weak_reference_on_the_cpu_is_the_tensor_itself() -> None:
    x = torch.randn(4)
    found = memory.make_weak_ref({"a": (x, 1, None), "b": [x, 2.0, True]})
    assert found["a"][0] is x and found["b"][0] is x and found["a"][1:] == (1, None) and found["b"][1:] == [2.0, True]
    for wrong in ("x", quantized()):
        with pytest.raises(TypeError, match="make_weak_ref"):
            memory.make_weak_ref([wrong])


def test_ones_stay_where_they_are() -> None:
    first = memory.get_cached_ones_tensor(4, torch.float32, torch.device("cpu"))
    assert torch.equal(first, torch.ones(4)) and first.dtype == torch.float32
    assert memory.get_cached_ones_tensor(4, torch.float32, torch.device("cpu")) is first
    assert memory.get_cached_ones_tensor(4, torch.float64, torch.device("cpu")) is not first


def test_questions_about_tensors() -> None:
    x, parameter = torch.randn(4, 4), torch.nn.Parameter(torch.randn(4))
    assert not memory.requires_grad(x, None) and memory.requires_grad(None, x, parameter)
    assert not memory.needs_quantized_gemm(x) and not memory.needs_quantized_gemm(parameter, rowwise=False)
    assert memory.needs_quantized_gemm(quantized())
    assert memory.maybe_contiguous(x[::2]).data_ptr() == x.data_ptr()
    assert memory.maybe_contiguous(x.T).stride(-1) == 1 and torch.equal(memory.maybe_contiguous(x.T), x.T)
    assert isinstance(quantized(), tuple(get_all_tensor_types()[2:])) and torch.Tensor in get_all_tensor_types()


def test_a_column_wise_copy_is_dropped() -> None:
    x = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(torch.randn(32, 32))
    before = x.dequantize()
    assert x.get_usages()["columnwise"]
    for _ in range(2):
        clear_columnwise_cache(x)
        assert x.get_usages() == {"rowwise": True, "columnwise": False} and torch.equal(x.dequantize(), before)


# -- parts of tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_parts_are_combined_without_a_copy(dim: int) -> None:
    whole = torch.randn(3, 4, 5)
    found = combine_tensors(list(whole.unbind(dim)), dim)
    assert torch.equal(found, whole) and found.data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("rows", [(0, 0), (1, 0), (0, 2, 1)])
def test_what_are_no_parts_is_not_combined(rows: tuple[int, ...]) -> None:
    whole = torch.randn(3, 4)
    with pytest.raises(ValueError, match="not the parts of one tensor"):
        combine_tensors([whole[row] for row in rows], 0)
    with pytest.raises(ValueError, match="not the parts of one tensor"):
        combine_tensors([whole[0].clone(), whole[1]], 0)


def test_a_buffer_is_copied_into_parts() -> None:
    buffer, outputs = torch.randn(5), [torch.zeros(2), torch.zeros(3)]
    split_and_copy(buffer, outputs, [2, 3])
    assert torch.equal(torch.cat(outputs), buffer)


# -- devices and dtypes -------------------------------------------------------------------------------------------


def test_devices_and_dtypes_that_are_left_open() -> None:
    assert devices.canonicalize_device("cpu") == torch.device("cpu")
    assert devices.canonicalize_device(None).type == te.Linear(16, 16).weight.device.type
    assert devices.canonicalize_dtype(None) == torch.get_default_dtype()
    assert devices.canonicalize_dtype(torch.float16) == torch.float16
    assert devices.devices_match("cpu", torch.device("cpu")) and not devices.devices_match("cpu", "meta")
    assert devices.devices_match("cuda:1", "cuda:1")
    group: Any = object()
    assert devices.canonicalize_process_group(group) is group
    if not torch.distributed.is_initialized():
        with pytest.raises(ValueError, match=r"torch\.distributed is not initialized"):
            devices.canonicalize_process_group(None)


def test_an_index_is_that_of_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def current_device() -> int:
            return 3

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert devices.canonicalize_device("cuda") == torch.device("cuda:3")
    assert devices.devices_match("cuda", "cuda:3") and not devices.devices_match("cuda:2", "cuda")


def test_versions_and_facts_of_the_gpu() -> None:
    assert devices.torch_version()[:2] == (devices.TORCH_MAJOR, devices.TORCH_MINOR) >= (2, 9)
    assert torch.__version__.startswith(".".join(map(str, devices.torch_version())))
    assert devices.torch_get_autocast_gpu_dtype() == torch.get_autocast_dtype("cuda")
    with devices.gpu_autocast_ctx(enabled=False) as region:
        assert region.device == "cuda"
    if torch.cuda.is_available():
        assert devices.get_sm_count() > 0
    else:
        with pytest.raises(RuntimeError, match="get_sm_count: PyTorch has no CUDA or ROCm device here"):
            devices.get_sm_count()


def test_comparisons_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert comparing.all_close(a, a.clone()) and not comparing.all_close(a, b)
    comparing.compare_tensors(a, b)
    assert "largest difference 0.5, largest elements 2.0 and 2.5" in capsys.readouterr().out
    comparing.compare_tensors(a, b[:1])
    assert capsys.readouterr().out == "The tensors have different shapes: (2,) and (1,)\n"
