# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention of the cuda backend as far as no GPU is needed: entries, specs, what FlashAttention is called with."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("te_dispatch_cuda._native")

from te_dispatch.backend_kit.attention import empty_gradients, spec_of  # noqa: E402
from te_dispatch.backend_kit.flash import rows_aligned  # noqa: E402
from te_dispatch.backend_kit.memory import contiguous_strides  # noqa: E402
from te_dispatch.core.errors import Declined  # noqa: E402
from te_dispatch.core.requirements import OneOf  # noqa: E402
from te_dispatch.numerics.quantized import Quantized  # noqa: E402
from te_dispatch.numerics.quantizers import DelayedQuantizer  # noqa: E402
from te_dispatch.ops.attention import lse_shape  # noqa: E402
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors  # noqa: E402
from te_dispatch.ops.results import Saved  # noqa: E402
from te_dispatch_cuda import packages  # noqa: E402
from te_dispatch_cuda.attention import (  # noqa: E402
    assemble,
    calls,
    cudnn,
    eight_bit,
    flash,
    frontend,
    geometry,
    rows,
    run,
)
from te_dispatch_cuda.attention.eight_bit_graphs import Scale  # noqa: E402
from te_dispatch_cuda.attention.graphs import Slot  # noqa: E402
from te_dispatch_cuda.implementations.attention import IMPLEMENTATIONS  # noqa: E402


class Library:
    """A planted package: every function records its call and returns what it was told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str, functions: dict[str, Any]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        planted = types.ModuleType(module)
        for name, result in functions.items():
            setattr(planted, name, self._function(name, result))
        parts = module.split(".")
        for end in range(1, len(parts)):
            parent = types.ModuleType(".".join(parts[:end]))
            parent.__path__ = []  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, parent.__name__, parent)
        monkeypatch.setitem(sys.modules, module, planted)
        for end in range(1, len(parts)):
            child = sys.modules[".".join(parts[: end + 1])]
            setattr(sys.modules[".".join(parts[:end])], parts[end], child)

    def _function(self, name: str, result: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return result(*args) if callable(result) else result

        return called


def _operands(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(*shape) for _ in range(3)]


def _forward_result(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    batch, length, heads, _features = q.shape
    return torch.zeros_like(q).contiguous(), torch.zeros(batch, heads, length), None, None


@pytest.mark.parametrize(
    "layout, packing, mask, window", [("sbhd", "h3d", "causal", None), ("bshd", None, "none", (2, 1))]
)
def test_repeated_attention_is_found_under_the_key_of_any_other(
    monkeypatch: pytest.MonkeyPatch, layout: str, packing: str | None, mask: str, window: Any
) -> None:
    found: list[Any] = []
    looked: list[Any] = []

    def unknown(spec: Any, *options: Any) -> Any:
        found.append((spec, *options))
        raise Declined("no GPU")

    monkeypatch.setattr(calls, "forward", unknown)
    monkeypatch.setattr(calls, "backward", unknown)
    q, k, v = torch.randn(2, 5, 4, 3, 8, dtype=torch.bfloat16).unbind(3)
    how = {
        "layout": layout, "packing": packing, "mask": mask, "window": window, "softmax_scale": 0.5,
        "bias_type": "alibi", "softcap": 0.0, "deterministic": True,
    }  # fmt: skip
    out, lse = torch.zeros(2, 5, 4, 8, dtype=torch.bfloat16), torch.zeros(lse_shape(q, layout))
    results = (out, lse, Saved("cuda.cudnn_attention", cudnn.FORMAT))
    with pytest.raises(Declined):
        cudnn.attention_fwd(q, k, v, **how)
    with pytest.raises(Declined):
        cudnn.attention_bwd(out, q, k, v, *results, **how)
    asked = types.SimpleNamespace(get=looked.append)
    monkeypatch.setattr(calls, "FORWARDS", asked)
    monkeypatch.setattr(calls, "BACKWARDS", asked)
    for function, plan, given in (
        (cudnn.attention_fwd, cudnn.plan_fwd, (q, k, v)),
        (cudnn.attention_bwd, cudnn.plan_bwd, (out, q, k, v, *results)),
    ):
        parameters = inspect.signature(function).parameters
        varying = tuple(parameters)[: len(given)]
        arguments = {name: p.default for name, p in parameters.items()} | how | dict(zip(varying, given))
        assert plan(varying, **arguments) is None
    assert looked == found == [(found[0][0], False, False), (found[0][0], False)]


PACKAGES = {
    "two": ("flash_attn.flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward"),
    "three": ("flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward"),
    "four": ("flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd"),
}


@pytest.mark.parametrize("word", PACKAGES)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_flash_is_called_batch_first(monkeypatch: pytest.MonkeyPatch, word: str, layout: str) -> None:
    module, forward, backward = PACKAGES[word]
    gradients = lambda q, k, v, *_: (torch.ones_like(q), torch.ones_like(k), torch.ones_like(v))  # noqa: E731
    library = Library(monkeypatch, module, {forward: _forward_result, backward: gradients})
    q, k, v = _operands(*((5, 2, 4, 8) if layout == "sbhd" else (2, 5, 4, 8)))
    made = getattr(flash, f"{word}_fwd")(q, k, v, layout=layout, mask="causal", softmax_scale=0.5)
    name, args, options = library.calls[0]
    assert name == forward and args[0].shape == (2, 5, 4, 8) and options["softmax_scale"] == 0.5
    assert options["causal"] is True
    assert made.out.shape == q.shape and made.lse.shape == (2, 4, 5)
    assert made.saved.format == made.saved.implementation + "/1"
    getattr(flash, f"{word}_bwd")(torch.ones_like(q), q, k, v, made.out, made.lse, made.saved, layout=layout)
    name, args, options = library.calls[1]
    assert name == backward and all(x.shape == (2, 5, 4, 8) for x in args[:5])


def test_windows_and_packed_sequences_reach_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch, "flash_attn_interface", {"_flash_attn_forward": _forward_result})
    q, k, v = _operands(2, 5, 4, 8)
    flash.three_fwd(q, k, v, layout="bshd", mask="causal_bottom_right", window=(3, -1), softcap=2.0, inference=True)
    options = library.calls[0][2]
    assert (options["window_size_left"], options["window_size_right"]) == (3, 0)
    assert options["causal"] is False and options["softcap"] == 2.0


def test_the_first_releases_of_flash_attention_3_are_given_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parameters (flash-attn 2.8.3's hopper folder) have no defaults, and the window is a pair."""
    found: list[dict[str, Any]] = []

    def forward(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
    ):  # fmt: skip
        found.append(locals())
        return _forward_result(q)

    def backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
        dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        found.append(locals())

    Library(monkeypatch, "flash_attn_interface", {})
    monkeypatch.setattr(sys.modules["flash_attn_interface"], "_flash_attn_forward", forward, raising=False)
    monkeypatch.setattr(sys.modules["flash_attn_interface"], "_flash_attn_backward", backward, raising=False)
    q, k, v = _operands(2, 5, 4, 8)
    how = {"layout": "bshd", "mask": "causal", "window": (3, 0), "softcap": 2.0, "deterministic": True}
    made = flash.three_fwd(q, k, v, **how)
    flash.three_bwd(torch.ones_like(q), q, k, v, made.out, made.lse, made.saved, **how)
    for given in found:
        assert given["window_size"] == (3, 0) and given["softcap"] == 2.0 and given["causal"] is False
        assert given["cu_seqlens_q"] is None and given["softmax_scale"] == 8**-0.5
    assert found[1]["deterministic"] is True and found[1]["dk"].shape == k.shape


def test_operands_lie_as_the_packages_load_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows that start at multiples of 16 bytes: others are copied, and these are not."""
    library = Library(monkeypatch, "flash_attn.flash_attn_interface", {"_flash_attn_forward": _forward_result})
    memory = torch.randn(2 * 5 * 4 * 8 + 16)
    shifted, wide = memory[1:321].view(2, 5, 4, 8), torch.randn(2, 5, 4, 9)[..., :8]
    turned, good = torch.randn(2, 5, 8, 4).mT, torch.randn(2, 5, 4, 16)[..., :8]
    for x in (shifted, wide, turned, good):
        flash.two_fwd(x, good, good, layout="bshd", mask="causal", inference=True)
        given = library.calls[-1][1][0]
        assert given.data_ptr() % 16 == 0 and given.stride(-1) == 1 and given.stride(2) % 4 == 0
        assert torch.equal(given, x) and (given.data_ptr() == x.data_ptr()) is (x is good)


def test_rows_that_see_nothing_have_the_operators_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
        lse[..., :2] = torch.inf
        return torch.zeros_like(q), lse, None, None

    Library(monkeypatch, "flash_attn.flash_attn_interface", {"_flash_attn_forward": forward})
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 3, 4, 8)
    made = flash.two_fwd(q, k, k, layout="bshd", mask="causal_bottom_right")
    assert (made.lse[..., :2] == -torch.inf).all() and (made.lse[..., 2:] == 0).all()
    assert (made.saved.tensors[0][..., :2] == torch.inf).all()  # as the package wants it back
    made = flash.two_fwd(k, q, q, layout="bshd", mask="causal_bottom_right")
    assert (made.lse[..., :2] == torch.inf).all()  # all rows see something: an infinity is the logits'


def test_gradients_that_a_package_gets_wrong_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch, "flash_attn.cute.interface", {"_flash_attn_fwd": None})
    q, bounds = torch.randn(9, 4, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    how = {"layout": "thd", "mask": "padding", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    with pytest.raises(Declined, match="unless the head dimension is a multiple of 64, got 16"):
        flash.four_fwd(q, q, q, **how)
    assert not library.calls


def test_flash_attention_4_is_called_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles when it is called, and not for two at once."""
    running, together = [0], []

    def slow(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        running[0] += 1
        together.append(running[0])
        time.sleep(0.02)
        running[0] -= 1
        return _forward_result(q)

    Library(monkeypatch, "flash_attn.cute.interface", {"_flash_attn_fwd": slow})
    q, k, v = _operands(2, 5, 4, 8)
    call = functools.partial(flash.four_fwd, q, k, v, layout="bshd", mask="causal")
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1] * 4


def test_a_diagonal_from_the_other_corner_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    Library(monkeypatch, "flash_attn_interface", {"_flash_attn_forward": _forward_result})
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 6, 4, 8), torch.randn(2, 6, 4, 8)
    with pytest.raises(Declined, match="bottom right"):
        flash.three_fwd(q, k, v, layout="bshd", mask="causal")


def test_every_entry_has_its_other_half() -> None:
    forwards = {i.name: i for i in IMPLEMENTATIONS if i.operator == "attention_fwd"}
    backwards = {i.name: i for i in IMPLEMENTATIONS if i.operator == "attention_bwd"}
    assert {f"{name}_bwd" for name in forwards} == set(backwards)
    for name, forward in forwards.items():
        assert backwards[f"{name}_bwd"].saved_format == forward.saved_format


def test_absent_packages_are_facts() -> None:
    found = packages.versions()
    assert set(found) == set(packages.DISTRIBUTIONS)
    assert packages._version(("surely-not-a-distribution",)) == packages.ABSENT


def test_strides_of_single_elements_are_not_looked_at() -> None:
    assert geometry.side((1, 2, 4, 64), (7, 256, 64, 1), "sbhd", 2, 1).strides == (256, 64, 512, 1)
    assert rows_aligned((2, 3, 4, 8), (96, 32, 8, 1), 2)
    assert not rows_aligned((2, 3, 4, 8), (0, 32, 8, 1), 2)  # broadcast
    assert not rows_aligned((2, 3, 4, 12), (144, 48, 12, 1), 2)  # rows of 24 bytes


def test_copies_of_lengths_do_not_share_memory() -> None:
    """The copy of one, let go, was the memory of the next one's copy."""
    every_other = torch.arange(12, dtype=torch.int32)[::2]
    q, kv, *others = rows.dense_lengths(AttentionTensors(cu_seqlens_q=every_other, cu_seqlens_kv=every_other))
    assert others == [None, None] and q is not None and kv is not None
    assert q.is_contiguous() and q.data_ptr() != kv.data_ptr()
    batch = rows.batch_of(_spec(layout="thd"), q, kv, None, None)
    assert batch == (q.data_ptr(), kv.data_ptr(), 0, 0)


def test_no_attention_claims_dropout() -> None:
    """cuDNN's masks repeat themselves, and FlashAttention's draw from a generator."""
    for one in IMPLEMENTATIONS:
        assert OneOf("dropout", False) in one.requires, one.name


@pytest.mark.parametrize("packing", [None, "3hd", "h3d", "2hd", "h2d"])
def test_graphs_write_gradients_where_their_memory_is(packing: str | None) -> None:
    spec = _spec(packing=packing)
    made = empty_gradients(spec._replace(device=torch.device("cpu")), torch.bfloat16)
    assert assemble._gradients(spec) == [(tuple(x.shape), x.stride()) for x in made]


def _spec(**options: Any) -> AttentionSpec:
    """Of contiguous operands; a device that is not there."""
    shape = options.get("q_shape", (5, 2, 4, 64))
    strides = contiguous_strides(shape)
    x = torch.empty(5, 2, 4, 64, dtype=torch.bfloat16, device="meta")
    made = spec_of(q=x, k=x, v=x)._replace(device=torch.device("cuda", 0))
    for name in "qkv":
        made = made._replace(**{f"{name}_shape": shape, f"{name}_stride": strides})
    return made._replace(**options)


def test_addresses_stand_in_the_order_of_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(run, "execute", lambda graph, device, stream, workspace, addresses: found.append(addresses))
    summarize = types.SimpleNamespace(summarize=lambda *_: None)
    call: Any = types.SimpleNamespace(
        prepared=False, cleaned=(), statistics_at=500, per_row=20, graph=None, sequences=summarize
    )
    run.forward(call, 0, 0, 1000, (1, 2, 3), 4, 5, bias=6, sink=9, table=11, largest=77, batch=None)
    run.backward(
        call, 0, 0, 1000, (1, 2, 3), 4, 5, 13, (14, 15, 16), bias=6, dbias=17, sink=9, dsink=18, batch=None
    )  # fmt: skip
    forward, backward = found
    assert len(forward) == len(backward) == Slot.OFFSETS
    both = {Slot.Q: 1, Slot.K: 2, Slot.V: 3, Slot.OUT: 4, Slot.LSE: 5, Slot.BIAS: 6, Slot.SINK: 9}
    assert {i: x for i, x in enumerate(forward) if x} == both | {
        Slot.ROW_MAX: 1500, Slot.ROW_SUM: 1520, Slot.TABLE_K: 11, Slot.TABLE_V: 11,
    }  # fmt: skip
    assert {i: x for i, x in enumerate(backward) if x} == both | {
        Slot.DOUT: 13, Slot.DQ: 14, Slot.DK: 15, Slot.DV: 16, Slot.DBIAS: 17, Slot.DSINK: 18,
    }  # fmt: skip


def test_gradients_of_packed_queries_that_may_see_nothing_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the sequences are the keys' own: then every row sees itself, and the graph reads dout where it lies."""
    dout: list[int] = []
    copied: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        run, "execute", lambda graph, device, stream, workspace, addresses: dout.append(addresses[Slot.DOUT])
    )
    monkeypatch.setattr(rows, "_native", types.SimpleNamespace(
        attention_clean=lambda *given: copied.append(given), attention_mend=lambda *_: None,
    ))  # fmt: skip
    shape = (10, 4, 64)
    packed = {"layout": "thd", "batch": 2, "max_seqlen_q": 6, "max_seqlen_kv": 6, "q_shape": shape}
    s = _spec(**packed, mask="padding_causal", band=(3, 0))
    call = assemble.Call(s)
    call.finish(types.SimpleNamespace(bytes=256, ragged=()), (3,))  # type: ignore[arg-type]
    call.prepared, call.written = False, (call.cleaned[0].target,) * 3
    for keys, expected in ((77, 256), (66, 13)):
        batch = rows.Batch(66, keys, 0, 0)
        run.backward(call, 0, 0, 0, (1, 2, 3), 4, 5, 13, (14, 15, 16), 0, 0, 0, 0, batch)
        assert dout[-1] == expected
    assert len(copied) == 1 and copied[0][-4:-1] == (3, 0, False)


def test_addresses_of_eight_bit_attention_stand_in_the_order_of_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, ...]] = []
    call = eight_bit.graphs.Call(None, graph=object(), bytes=256)  # type: ignore[arg-type]
    monkeypatch.setattr(eight_bit.graphs, "forward", lambda key, inference: call)
    monkeypatch.setattr(eight_bit.graphs, "backward", lambda key, encodings: call)
    monkeypatch.setattr(eight_bit, "stream_of", lambda index: 0)
    monkeypatch.setattr(eight_bit, "_run", lambda call, device, stream, ws, addresses, casts: found.append(addresses))

    def record(encoding: str) -> Quantized:
        data, scale = torch.zeros(4, 2, 3, 16, dtype=torch.uint8), torch.ones(1)
        return Quantized(
            data, None, scale, None, encoding, "tensor", "canonical", tuple(data.shape), torch.bfloat16, data.device
        )

    def cast(encoding: str) -> DelayedQuantizer:
        return DelayedQuantizer(encoding, scale=torch.ones(1), amax=torch.zeros(1))

    def scale_of(x: Any) -> int:
        return int(x.row_scale_inv.data_ptr())

    q, k, v, dout = (record(encoding) for encoding in ("e4m3fn", "e4m3fn", "e4m3fn", "e5m2"))
    by_s, by_out, by_dp, by_d = (cast(encoding) for encoding in ("e4m3fn", "e4m3fn", "e5m2", "e5m2"))
    made = eight_bit.attention_fwd(q, k, v, s_quantizer=by_s, out_quantizer=by_out)
    back = eight_bit.attention_bwd(
        dout, q, k, v, made.out, made.lse, made.saved, s_quantizer=by_s, dp_quantizer=by_dp, dqkv_quantizer=by_d
    )  # fmt: skip
    forward, backward = found
    assert len(forward) == Scale.AMAX_OUT + 1 and len(backward) == Scale.AMAX_DP + 1
    for addresses in found:
        assert [addresses[i] for i in (Slot.Q, Slot.K, Slot.V)] == [x.row_data.data_ptr() for x in (q, k, v)]
        assert [addresses[i] for i in (Scale.OF_Q, Scale.OF_K, Scale.OF_V)] == [scale_of(x) for x in (q, k, v)]
        assert addresses[Slot.OUT] == made.out.row_data.data_ptr() and addresses[Slot.LSE] == made.lse.data_ptr()
        assert addresses[Scale.BY_S] == by_s.scale.data_ptr()
    assert forward[Scale.BY_OUT] == by_out.scale.data_ptr()
    of_gradients = [backward[i] for i in (Slot.DOUT, Slot.DQ, Slot.DK, Slot.DV)]
    assert of_gradients == [x.row_data.data_ptr() for x in (dout, back.dq, back.dk, back.dv)]
    assert (backward[Scale.OF_OUT], backward[Scale.OF_DOUT]) == (scale_of(made.out), scale_of(dout))
    by_gradients = [backward[i] for i in (Scale.BY_DQKV, Scale.BY_DQKV_2, Scale.BY_DQKV_3)]
    assert by_gradients == [by_d.scale.data_ptr()] * 3


def test_a_call_without_rows_is_declined() -> None:
    assert geometry.extents(_spec()).rows == 5
    with pytest.raises(Declined, match="no dimension of 0"):
        geometry.extents(_spec(q_shape=(0, 2, 4, 64)))


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_more_sequences_than_a_grid_has_blocks_are_declined(layout: str) -> None:
    def of(batch: int) -> Any:
        if layout == "thd":
            return _spec(layout="thd", batch=batch, q_shape=(70_000, 4, 64))
        return _spec(batch=batch, q_shape=(5, batch, 4, 64))

    assert geometry.extents(of(65_535)).batch == 65_535
    with pytest.raises(Declined, match="batches up to 65535, got 65536"):
        geometry.extents(of(65_536))


@pytest.mark.parametrize("scale", [0.0, -0.25, float("nan")])
def test_a_scale_that_is_not_positive_is_declined(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Declined, match="positive softmax_scale"):
        geometry.extents(_spec(softmax_scale=scale))
    Library(monkeypatch, "flash_attn_interface", {"_flash_attn_forward": _forward_result})
    q, k, v = _operands(2, 5, 4, 8)
    with pytest.raises(Declined, match="positive softmax_scale"):
        flash.three_fwd(q, k, v, layout="bshd", mask="none", softmax_scale=scale)


def test_packed_sequences_of_one_row_are_described_as_two() -> None:
    """cuDNN's kernel for a single row puts log-sum-exps of grouped heads elsewhere."""
    found = geometry.extents(_spec(layout="thd", batch=7, max_seqlen_q=1, max_seqlen_kv=1, q_shape=(7, 4, 64)))
    assert (found.rows, found.columns) == (2, 2)


def test_the_package_is_shown_the_process_s_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    with frontend._searched_first("/here"):
        assert os.environ["LD_LIBRARY_PATH"].split(os.pathsep) == ["/here", "/elsewhere"]
    assert os.environ["LD_LIBRARY_PATH"] == "/elsewhere"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    with frontend._searched_first("/here"):
        assert os.environ["LD_LIBRARY_PATH"] == "/here"
    assert "LD_LIBRARY_PATH" not in os.environ


def test_native_functions_name_a_bad_argument() -> None:
    native = rows._native
    with pytest.raises(ValueError, match="casts"):
        native.attention_casts(0, 0, False, ((1, 2),))
    with pytest.raises(ValueError, match="query rows"):
        native.attention_mend(0, 0, 1, 0, 0, 0, 0, 1, 1, False, False, -1, -1, False, 8, *[0] * 17)
    with pytest.raises(ValueError, match="batch"):
        native.attention_clean(0, 0, -1, 0, 0, 0, 0, 1, 1, False, -1, -1, False, ())
