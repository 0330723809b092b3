# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``_extra_state`` as releases of Transformer Engine wrote it: archives, recipes with functions, former keys.

Nothing in an entry is run. Entries are made here, with stand-ins for the classes that they name.
"""

from __future__ import annotations

import functools
import io
import logging
import pickle
import sys
import types
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.pytorch.fp8 import transformer_engine_state
from te_dispatch.pytorch.fp8.delayed_scales import StateError

HISTORY, SCALE = torch.arange(24.0).reshape(4, 6), torch.arange(1.0, 7.0)
USERS = "users_algorithms"


def _state(**more: Any) -> dict[str, Any]:
    """Of a module of one product, as releases before 2.0 saved it: without a recipe."""
    return {
        "scale_fwd": SCALE[:3].clone(), "scale_inv_fwd": 1 / SCALE[:3], "amax_history_fwd": HISTORY[:, :3].clone(),
        "scale_bwd": SCALE[3:5], "scale_inv_bwd": 1 / SCALE[3:5], "amax_history_bwd": HISTORY[:, 3:5],
        "global_fp8_buffer": {"fwd_amax_1": [torch.ones(3)]}, "global_fp8_state": (True, {}),
        "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": 1, "fp8_max_fwd": 448, "fp8_max_bwd": 57344.0},
        **more,
    }  # fmt: skip


def _archive(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    return file


def _bytes(state: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(state if isinstance(state, bytes) else pickle.dumps(state)), dtype=torch.uint8)


def _loaded(entry: Any) -> te.Linear:
    layer = te.Linear(32, 48, device="cpu")
    assert not any(layer.load_state_dict({**layer.state_dict(), "_extra_state": entry}))
    return layer


def _assert_loaded(layer: te.Linear, margin: int = 0) -> None:
    forward, backward = layer.fp8_state.scales.forward, layer.fp8_state.scales.backward
    assert forward is not None and backward is not None
    assert torch.equal(forward.scale, SCALE[:2]) and torch.equal(forward.history, HISTORY[:, :2])
    assert torch.equal(backward.scale, SCALE[3:4]) and torch.equal(backward.history, HISTORY[:, 3:4])
    assert forward.max_values == (448.0, 448.0) and backward.max_values == (57344.0,)
    assert forward.margin == backward.margin == margin


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes recipes that pickle under Transformer Engine's name."""
    module: Any = types.ModuleType("transformer_engine.common.recipe")

    class DelayedScaling:
        pass

    DelayedScaling.__module__, DelayedScaling.__qualname__ = module.__name__, "DelayedScaling"
    module.DelayedScaling = DelayedScaling
    for name in ("transformer_engine", "transformer_engine.common"):  # pickle imports them too
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(transformer_engine_state, "_warned", set())

    def make(**attributes: Any) -> Any:
        made = DelayedScaling()
        made.__dict__.update({"margin": 2, "amax_compute_algo": "max"}, **attributes)
        return made

    return make


@pytest.fixture
def algorithm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function of a user's module."""
    module: Any = types.ModuleType(USERS)

    def compute(history: Any) -> Any:
        raise AssertionError("called")

    compute.__module__, compute.__qualname__ = USERS, "compute"
    module.compute = compute
    monkeypatch.setitem(sys.modules, USERS, module)
    return compute


# -- archives ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [_archive, lambda state: io.BytesIO(pickle.dumps(state)), _bytes])
def test_states_before_recipes_load(form: Callable[[Any], Any]) -> None:
    _assert_loaded(_loaded(form(_state())))


def test_an_archive_with_a_recipe_loads(recipe: Callable[..., Any]) -> None:
    _assert_loaded(_loaded(_archive(_state(recipe=recipe()))), margin=2)


def test_archives_load_from_wherever_the_file_was_read_to() -> None:
    entry = _archive(_state())
    entry.read()
    _assert_loaded(_loaded(entry))
    _assert_loaded(_loaded(entry))


def test_archives_in_a_checkpoint_that_was_saved(tmp_path: Any) -> None:
    layer = te.Linear(32, 48, device="cpu")
    torch.save({**layer.state_dict(), "_extra_state": _archive(_state())}, tmp_path / "checkpoint.pt")
    layer.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=False))
    _assert_loaded(layer)


@pytest.mark.parametrize("entry", [io.BytesIO(), _archive({}), _archive({"extra_fp8_variables": {}})])
def test_archives_without_a_state_change_nothing(entry: io.BytesIO) -> None:
    assert _loaded(entry).fp8_state.scales.forward is None
    assert not any(
        te.LayerNorm(32, device="cpu").load_state_dict({"_extra_state": entry}, strict=False).unexpected_keys
    )


def _damaged(name: str) -> io.BytesIO:
    """An archive without a record, or of the other order of bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(_archive(_state())) as old, zipfile.ZipFile(made, "w") as new:
        for record in old.namelist():
            if not record.endswith(name):
                new.writestr(record, old.read(record))
            elif name == "byteorder":
                new.writestr(record, {"little": "big", "big": "little"}[old.read(record).decode()])
    return made


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (io.BytesIO(b"PK\x03\x04 and no more"), "BadZipFile"),
        (_damaged("data.pkl"), "neither te_dispatch.extra_state nor Transformer Engine's"),
        (_damaged("data/0"), "KeyError"),
        (_damaged("byteorder"), "-endian"),
        (_archive([1]), "must be a dict of Transformer Engine's, got list"),
        (_archive({**_state(), "scale_fwd": SCALE}), r"scale_fwd must be \(3,\), got shape \(6,\)"),
    ],
)
def test_archives_that_hold_no_state_are_refused(entry: io.BytesIO, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        _loaded(entry)


# -- functions in recipes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [_archive, _bytes])
@pytest.mark.parametrize("attribute", ["amax_compute_algo", "scaling_factor_compute_algo"])
def test_a_function_in_a_recipe_is_left_out_with_a_warning(
    form: Callable[[Any], Any],
    attribute: str,
    recipe: Callable[..., Any],
    algorithm: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entry = form(_state(recipe=recipe(**{attribute: algorithm})))
    monkeypatch.delitem(sys.modules, USERS)
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        layers = [_loaded(entry), _loaded(entry)]
    for layer in layers:
        _assert_loaded(layer, margin=2)
    assert USERS not in sys.modules
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"Linear: extra state has a recipe that names {USERS}.compute, which is not loaded")


def test_a_recipe_with_a_bound_function_and_one_of_a_users_class_load(
    recipe: Callable[..., Any], algorithm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = _bytes(_state(recipe=recipe(amax_compute_algo=functools.partial(algorithm, None))))
    own = type("Own", (type(recipe()),), {"__module__": USERS})
    monkeypatch.setattr(sys.modules[USERS], "Own", own, raising=False)
    of_class = recipe()
    of_class.__class__ = own
    entry = _bytes(_state(recipe=of_class))
    monkeypatch.delitem(sys.modules, USERS)
    for one in (partial, entry):
        _assert_loaded(_loaded(one), margin=2)


def test_a_custom_recipe_without_a_state_says_nothing(
    recipe: Callable[..., Any], algorithm: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    entry = _bytes({"recipe": recipe(qfactory=algorithm), "extra_fp8_variables": {"num_gemms": 1}})
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        assert _loaded(entry).fp8_state.scales.forward is None
    assert not caplog.records


# -- harmful pickles ---------------------------------------------------------------------------------------------------


class _Harmful:
    def __init__(self, make: Any = print, arguments: Any = ("run",), state: Any = None) -> None:
        self.reduced = make, arguments, state

    def __reduce__(self) -> Any:
        return self.reduced


class _Constructed(dict[str, str]):
    """Would be made by the opcodes of new objects."""

    def __new__(cls, *args: Any) -> _Constructed:
        print("run")
        return super().__new__(cls)

    def __setitem__(self, key: str, value: str) -> None:
        print("run")


def _constructed() -> _Constructed:
    made = dict.__new__(_Constructed)
    dict.__setitem__(made, "a", "b")
    return made


HARMFUL: dict[str, Any] = {
    "call": _Harmful(),
    "call of what was imported": _Harmful(exec, ("print('run')",)),
    "import": _Harmful(__import__, ("this",)),
    "new object": _constructed(),
    "state": _Harmful(types.SimpleNamespace, (), {"a": _Harmful()}),
}


@pytest.mark.parametrize("form", [_archive, _bytes])
@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_pickles_run_nothing(
    form: Callable[[Any], Any], name: str, recipe: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    sys.modules.pop("this", None)
    for place in ("scale_fwd", "extra_fp8_variables", "of nobody"):
        entry = form({**_state(), place: {"a": [HARMFUL[name]]}})
        with pytest.raises(RuntimeError, match=r"is a pickle that names \S+, which no state of delayed scaling needs"):
            _loaded(entry)
    in_recipe = form(_state(recipe=recipe(amax_compute_algo=HARMFUL[name])))
    _assert_loaded(_loaded(in_recipe), margin=2)
    with pytest.raises(RuntimeError, match="margin must be an int"):
        _loaded(form(_state(recipe=recipe(margin=HARMFUL[name]))))
    assert capsys.readouterr().out == "" and "this" not in sys.modules


@pytest.mark.parametrize(
    "pickled",
    [
        b"(S'run'\nibuiltins\nprint\n.",  # the opcode INST
        b"(cbuiltins\nprint\nS'run'\no.",  # OBJ
        b"cbuiltins\nprint\n(S'run'\nt\x81.",  # NEWOBJ
        b"cbuiltins\nprint\n}S'__setstate__'\ncbuiltins\nexec\nsb.",  # BUILD of a stand-in's class
        b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'__defaults__'\n)stb.",  # BUILD of a function
        b"ctorch.storage\n_load_from_bytes\n(cbuiltins\nprint\ntR.",
        b"(S'storage'\nS'a'\nS'b'\nS'c'\nI1\ntQ.",  # a tensor of an archive where there is none
        b"\x82\x01.",  # EXT1
    ],
)
def test_opcodes_run_nothing_either(pickled: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    before = vars(torch._utils._rebuild_tensor_v2).copy(), torch._utils._rebuild_tensor_v2.__defaults__
    with pytest.raises(StateError):
        te.Linear(32, 48, device="cpu").set_extra_state(_bytes(pickled))
    assert capsys.readouterr().out == ""
    assert before == (vars(torch._utils._rebuild_tensor_v2), torch._utils._rebuild_tensor_v2.__defaults__)


def test_an_entry_that_holds_itself_is_read() -> None:
    state = _state()
    state["extra_fp8_variables"]["again"] = [state["extra_fp8_variables"]]
    _assert_loaded(_loaded(_bytes(state)))


# -- the former key of attention ---------------------------------------------------------------------------------------

ATTENTION = {
    "DotProductAttention": ("", lambda: te.DotProductAttention(4, 16)),
    "MultiheadAttention": ("core_attention.", lambda: te.MultiheadAttention(64, 4, device="cpu")),
    "TransformerLayer": (
        "self_attention.core_attention.", lambda: te.TransformerLayer(64, 128, 4, device="cpu")),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("content", [torch.empty(0, dtype=torch.uint8), _bytes(_state()), _archive(_state()), None])
@pytest.mark.parametrize("both", [False, True])
def test_attention_takes_the_key_of_its_former_part(
    name: str, content: Any, both: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prefix, make = ATTENTION[name]
    state = make().state_dict()
    if not both:
        del state[f"{prefix}_extra_state"]
    state[f"{prefix}fused_attention._extra_state"] = content
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        assert not any(make().load_state_dict(state, strict=True))
    messages = [record.getMessage() for record in caplog.records]
    held = content is not None and not (isinstance(content, torch.Tensor) and not content.numel())
    assert (
        messages == ["DotProductAttention has no delayed-scaling state; the one in the checkpoint has no effect"] * held
    )


def test_other_keys_of_attention_are_unexpected() -> None:
    module = te.DotProductAttention(4, 16)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*fused_attention\.weight"):
        module.load_state_dict({"fused_attention.weight": torch.ones(1)})
