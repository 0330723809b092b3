# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``_extra_state``: a tensor of bytes in every module, this project's and Transformer Engine's, through checkpoints.

``transformer_engine_state.json`` holds entries that Transformer Engine 2.20.2 wrote, with the numbers in them.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling
from te_dispatch.pytorch.fp8 import extra_state
from te_dispatch.pytorch.fp8.delayed_scales import StateError

RECIPE = DelayedScaling(amax_history_len=4)
RECORDED = json.loads(Path(__file__).with_name("transformer_engine_state.json").read_text())


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    how: Any = {"layer_type": "decoder", "qk_norm_type": "RMSNorm", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te.TransformerLayer(64, 128, 4, device="cpu", **how)


def _trained(steps: int = 2, recipe: Any = RECIPE) -> torch.nn.Module:
    model = _model()
    for seed in range(steps):
        _step(model, seed, recipe)
    return model


def _step(model: torch.nn.Module, seed: int = 7, recipe: Any = RECIPE) -> torch.Tensor:
    x, encoded = torch.randn(2, 16, 2, 64, generator=torch.Generator().manual_seed(seed))
    with te.autocast(recipe=recipe):
        y = model(x, encoder_output=encoded)
    y.square().sum().backward()
    return y.detach()


def _entries(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value for key, value in model.state_dict().items() if key.endswith("_extra_state")}


def _assert_same(a: torch.nn.Module, b: torch.nn.Module) -> None:
    """Parameters and scales, bit for bit, and what comes of them."""
    of_a, of_b = a.state_dict(), b.state_dict()
    assert list(of_a) == list(of_b) and all(torch.equal(of_a[key], of_b[key]) for key in of_a)
    a.zero_grad()
    b.zero_grad()
    assert torch.equal(_step(a), _step(b))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters()))


def test_every_module_has_an_entry() -> None:
    entries = _entries(_model())
    for part in ("self_attention.q_norm", "self_attention.core_attention", "inter_attention.proj", "layernorm_mlp"):
        assert entries[f"{part}._extra_state"].shape == (0,)
    assert all(value.dtype == torch.uint8 and value.device.type == "cpu" for value in entries.values())
    trained = _entries(_trained())
    assert trained["layernorm_mlp._extra_state"].numel() and not trained["self_attention.q_norm._extra_state"].numel()
    assert not any(value.numel() for value in _entries(_trained(1, Float8CurrentScaling())).values())


def test_entries_are_safetensors_documents() -> None:
    layer = _trained().layernorm_mlp
    content = bytes(layer.get_extra_state().numpy())
    length = int.from_bytes(content[:8], "little")
    assert length == 2040  # whatever numbers there are: room that is made for a state fits all of its kind
    header = json.loads(content[8 : 8 + length])
    assert (8 + length) % 8 == 0
    start, stop = header["forward.scale"]["data_offsets"]
    found = torch.frombuffer(bytearray(content[8 + length :][start:stop]), dtype=torch.float32)
    assert torch.equal(found, layer.fp8_state.scales.forward.scale)
    assert header["__metadata__"]["format"] == "te_dispatch.extra_state"
    assert stop <= len(content) - 8 - length


def test_torch_save_reads_back_without_pickle() -> None:
    model, other, buffer = _trained(), _model(), io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    _assert_same(model, other)


@pytest.mark.parametrize("under_autocast", (False, True))
def test_distributed_checkpoints_fill_a_model_that_never_ran(under_autocast: bool, tmp_path: Path) -> None:
    """Its entries are empty, or under an autocast have the room that the recipe needs."""
    model, other = _trained(), _model()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    with te.autocast(enabled=under_autocast, recipe=RECIPE):
        state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    _assert_same(model, other)
    assert torch.equal(_step(model), _step(other))


def test_distributed_checkpoints_of_models_that_never_ran(tmp_path: Path) -> None:
    """What is saved is an empty tensor, which a plain one can take."""
    model = _model()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "fresh")
    plain = {key: torch.empty(0, dtype=torch.uint8) for key in _entries(model)}
    dcp.load(plain, checkpoint_id=tmp_path / "fresh")
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "fresh")
    model.load_state_dict(state)
    assert not any(len(entry) for entry in _entries(model).values())


@pytest.mark.parametrize("record", RECORDED["modules"], ids=lambda record: record["class"])
def test_distributed_checkpoints_of_transformer_engine_fill_a_model(record: dict[str, Any], tmp_path: Path) -> None:
    def made() -> torch.nn.Module:
        linear = record["class"] == "Linear"
        return te.Linear(32, 48, device="cpu") if linear else te.LayerNormMLP(32, 64, device="cpu")

    expected, layer = made(), made()
    saved = {**expected.state_dict(), "_extra_state": _bytes(base64.b64decode(record["bytes"]))}
    expected.load_state_dict(saved)
    dcp.save(saved, checkpoint_id=tmp_path)
    state = layer.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    layer.load_state_dict(state)
    assert all(torch.equal(entry, expected.state_dict()[key]) for key, entry in layer.state_dict().items())


def test_distributed_checkpoints_that_were_read_can_be_saved_again(tmp_path: Path) -> None:
    """By whatever saves tensors: an entry that was filled has the bytes of the one that was saved."""
    model = _trained()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "first")
    state = _model().state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "first")
    dcp.save(state, checkpoint_id=tmp_path / "second")
    torch.save(state, tmp_path / "state.pt")
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    assert (tmp_path / "state.pt").stat().st_size < 2 * (tmp_path / "plain.pt").stat().st_size
    again = _model().state_dict()
    dcp.load(again, checkpoint_id=tmp_path / "second")
    for found in (again, copy.deepcopy(state), torch.load(tmp_path / "state.pt", weights_only=True)):
        other = _model()
        other.load_state_dict(found)
        assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_distributed_checkpoints_are_staged(tmp_path: Path) -> None:
    """`async_save` copies the state_dict first, empty entries with it."""
    model, state = _model(), _model().state_dict()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        dcp.async_save(model.state_dict(), checkpoint_id=tmp_path).result()
    finally:
        torch.distributed.destroy_process_group()
    dcp.load(state, checkpoint_id=tmp_path)
    assert not any(model.load_state_dict(state))


def test_an_empty_entry_is_a_plain_empty_tensor_for_everything_else() -> None:
    entry = te.Linear(32, 48, device="cpu").get_extra_state()
    assert entry.shape == (0,) and entry.size(0) == 0 and len(entry) == 0 and entry.dtype == torch.uint8
    copies = entry.clone(), copy.deepcopy(entry), entry.new_empty(entry.size()), torch.cat((entry, entry))
    assert all(type(made) is torch.Tensor and made.shape == (0,) for made in copies)
    file = io.BytesIO()
    torch.save({"_extra_state": entry}, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)["_extra_state"]) is torch.Tensor


def test_a_damaged_entry_of_a_distributed_checkpoint_is_an_error(tmp_path: Path) -> None:
    saved = _trained().state_dict()
    key = next(key for key, entry in saved.items() if key.endswith("_extra_state") and len(entry))
    saved[key] = saved[key].clone()
    saved[key][9:40] = ord("x")
    dcp.save(saved, checkpoint_id=tmp_path)
    state = _model().state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    with pytest.raises(RuntimeError, match="its header cannot be read"):
        _model().load_state_dict(state)


def test_reading_a_state_under_an_autocast_changes_none_that_there_is() -> None:
    model = _trained()
    before = _entries(model)
    with te.autocast(recipe=DelayedScaling(amax_history_len=9)):
        after = _entries(model)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("record", RECORDED["modules"], ids=lambda record: record["class"])
def test_transformer_engine_s_delayed_scaling_loads(record: dict[str, Any]) -> None:
    layer = te.Linear(32, 48, device="cpu") if record["class"] == "Linear" else te.LayerNormMLP(32, 64, device="cpu")
    layer.load_state_dict({**layer.state_dict(), "_extra_state": _bytes(base64.b64decode(record["bytes"]))})
    ways = (layer.fp8_state.scales.forward, "fwd", (0, 1), 3), (layer.fp8_state.scales.backward, "bwd", (0,), 2)
    for scales, way, kept, of_each in ways:
        columns = [of_each * gemm + part for gemm in range(layer.gemm_count) for part in kept]
        assert torch.equal(scales.history, torch.tensor(record[way]["amax_history"])[:, columns])
        assert torch.equal(scales.scale, torch.tensor(record[way]["scale"])[columns])
        assert scales.scale_amax.isnan().all() and scales.margin == RECORDED["recipe"]["margin"]
        assert set(scales.max_values) == {448.0 if way == "fwd" else 57344.0}


def test_transformer_engine_s_empty_entries_load() -> None:
    model = _model()
    state = {key: torch.empty(0, dtype=torch.uint8) if key.endswith("_extra_state") else value
             for key, value in _trained(0).state_dict().items()}  # fmt: skip
    assert not any(model.load_state_dict(state, strict=True))


class _Harmful:
    def __reduce__(self) -> Any:
        return print, ("run",)


REFUSED = {
    "code": (_bytes(pickle.dumps({"scale_fwd": _Harmful()})), "names builtins.print, which no state"),
    "a tensor's own": (_bytes(pickle.dumps({"a": torch.device("cpu")})), "names torch.device, which no state"),
    "noise": (torch.arange(40, dtype=torch.uint8), "neither te_dispatch.extra_state nor Transformer Engine's"),
    "floats": (torch.zeros(3), "must be a vector of uint8, got torch.float32 of shape (3,)"),
    "a list": (_bytes(pickle.dumps([1])), "must be a dict of Transformer Engine's, got list"),
    "no tensors": (_bytes(pickle.dumps({"scale_fwd": 1.0})), "lacks scale_fwd or amax_history_fwd"),
    "another module's": (
        _bytes(base64.b64decode(RECORDED["modules"][1]["bytes"])), "scale_fwd must be (3,), got shape (6,)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_state_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry, words = REFUSED[name]
    layer = te.Linear(32, 48, device="cpu")
    with pytest.raises(RuntimeError) as caught:
        layer.load_state_dict({**layer.state_dict(), "_extra_state": entry})
    assert words in str(caught.value) and "Linear: extra state" in str(caught.value)
    assert layer.fp8_state.scales.forward is None and capsys.readouterr().out == ""


@pytest.mark.parametrize("cut", [1, 8, 20, 200, -4])
def test_damaged_entries_are_refused(cut: int) -> None:
    entry = _trained().layernorm_mlp.get_extra_state()
    with pytest.raises(StateError, match=r"damaged|cannot be read|neither"):
        te.LayerNormMLP(64, 128, device="cpu").set_extra_state(entry[:cut])


def test_a_later_version_is_refused_by_its_number() -> None:
    content = bytes(_trained().layernorm_mlp.get_extra_state().numpy()).replace(b'"version":"2"', b'"version":"3"')
    with pytest.raises(StateError, match="of version 2, got version '3'"):
        te.LayerNormMLP(64, 128, device="cpu").set_extra_state(_bytes(content))


def test_encoding_and_decoding_are_inverse() -> None:
    states = {key: scales.as_data() for key, scales in _trained().layernorm_mlp.fp8_state.scales.live().items()}
    found = extra_state.decoded(extra_state.encoded(states), "state")
    assert found.keys() == states.keys()
    for key, parts in states.items():
        for name, value in parts.items():
            got = found[key][name]
            assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value, (key, name)
