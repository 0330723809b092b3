# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every operator: its facts on realistic calls, its shape function, its trampoline, its pieces."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import te_dispatch
from te_dispatch import ops
from te_dispatch.core import codegen
from te_dispatch.core.facts import UNKNOWN
from te_dispatch.core.manager import OpManager
from te_dispatch.core.manifest import Implementation, Manifest
from te_dispatch.core.operator import OPERATORS, Fact, dtype_name, operator
from te_dispatch.core.policy import COMPOSITE, Policy
from te_dispatch.core.resolve import resolve, resolve_recorded
from te_dispatch.core.snapshot import InstalledBackend, Snapshot
from tests.core.operator_calls import Call, calls, flatten
from tests.core.toy import CPU, target

HERE, META = calls("cpu"), calls("meta")
NAMES = sorted(OPERATORS)


def bound(call: Call) -> dict[str, Any]:
    arguments = OPERATORS[call.op].signature.bind(*call.args, **call.kwargs)
    arguments.apply_defaults()
    return dict(arguments.arguments)


@pytest.fixture(scope="module")
def manager() -> OpManager:
    return OpManager(Snapshot(), environ={})


def read(manager: OpManager, call: Call) -> dict[str, Any]:
    """Every fact of a call, with no excuse for an expression that fails."""
    args = tuple(bound(call).values())
    readers = manager.fact_readers(OPERATORS[call.op])
    return {name: OPERATORS[call.op].facts[name].canonical(r(*args)) for name, r in readers.items()}


def test_the_calls_cover_every_operator_with_every_argument_given_and_left_out() -> None:
    # Its shape is the implementation's secret until it runs, so it has no case among the shapes.
    assert {c.op for c in HERE} == set(OPERATORS) - {"relayout_scales"}
    never: list[str] = []
    for name in {c.op for c in HERE}:
        for p in OPERATORS[name].signature.parameters.values():
            given = [bound(c)[p.name] is not p.default for c in HERE if c.op == name]
            if not any(given):
                never.append(f"{name} with {p.name}")
            if p.default is not p.empty and all(given):
                never.append(f"{name} without {p.name}")
    assert not never


@pytest.mark.parametrize("call", HERE, ids=repr)
def test_facts_evaluate_to_plain_known_values(manager: OpManager, call: Call) -> None:
    for name, value in read(manager, call).items():
        if call.op == "dequantize" or name != "x.usage":
            assert value is None or isinstance(value, (str, int, float, bool, tuple)), (name, value)
            assert value is not UNKNOWN
        kind = OPERATORS[call.op].facts[name].kind
        assert kind != "size" or type(value) is int, (name, value)
        assert kind != "dtype" or value is None or isinstance(value, str), (name, value)


@pytest.mark.parametrize("call", HERE, ids=repr)
def test_the_device_is_the_operands(manager: OpManager, call: Call) -> None:
    device = codegen.reader(OPERATORS[call.op], manager.namespace, OPERATORS[call.op].device, "device")
    assert device(*bound(call).values()) == torch.device("cpu")


@pytest.mark.parametrize("name", NAMES)
def test_every_fact_can_be_part_of_a_key(manager: OpManager, name: str) -> None:
    toy = OPERATORS[name]
    expression = codegen.key_expression(toy, [(fact, None) for fact in toy.facts], True)
    key = codegen.reader(toy, manager.namespace, expression, "key")
    for call in (c for c in HERE if c.op == name):
        hash(key(*bound(call).values()))


@pytest.mark.parametrize("call", META, ids=repr)
def test_shape_functions_give_the_contracts_shapes_on_meta_tensors(call: Call) -> None:
    result = OPERATORS[call.op].shape(**bound(call))
    assert flatten(result) == call.shapes
    hint = str(OPERATORS[call.op].signature.return_annotation)
    if isinstance(result, tuple):
        assert type(result).__name__ == hint


@pytest.mark.parametrize("call", HERE, ids=repr)
def test_shape_functions_give_the_contracts_shapes_under_a_fake_mode(call: Call) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        (fake,) = [c for c in calls("cpu") if repr(c) == repr(call) and c.shapes == call.shapes][:1]
        assert flatten(OPERATORS[fake.op].shape(**bound(fake))) == call.shapes


@pytest.mark.parametrize("call", [c for c in META if c.op != "relayout_scales"], ids=repr)
def test_a_call_on_meta_tensors_needs_no_backend(manager: OpManager, call: Call) -> None:
    assert flatten(getattr(manager.ops, call.op)(*call.args, **call.kwargs)) == call.shapes


@pytest.mark.parametrize("call", [c for c in HERE if c.op != "attention_bwd"], ids=repr)
def test_the_reference_serves_the_calls_with_the_contracts_shapes(call: Call) -> None:
    """So each is valid. (A backward needs what its own forward has saved.)"""
    with te_dispatch.using(**{call.op: "reference"}):
        assert flatten(getattr(ops, call.op)(*call.args, **call.kwargs)) == call.shapes


@pytest.mark.parametrize("name", NAMES)
def test_the_public_function_is_the_stubs_twin(name: str) -> None:
    function = getattr(ops, name)
    assert inspect.signature(function) == OPERATORS[name].signature
    assert inspect.getdoc(function) == OPERATORS[name].doc and OPERATORS[name].doc
    assert function.__name__ == name and name in ops.__all__


@pytest.mark.parametrize("name", NAMES)
def test_the_shape_function_takes_what_the_operator_takes(name: str) -> None:
    toy = OPERATORS[name]
    inspect.signature(toy.shape).bind(
        **{p.name: None for p in toy.signature.parameters.values() if p.default is p.empty}
    )


@pytest.mark.parametrize("name", NAMES)
def test_companions_point_at_each_other(name: str) -> None:
    toy = OPERATORS[name]
    if toy.companion is not None:
        other = OPERATORS[toy.companion]
        assert other.companion == name and other.backward != toy.backward and other.family == toy.family
        forward, backward = (other, toy) if toy.backward else (toy, other)
        assert forward.companion_facts is not None
        unknown = set(forward.companion_facts({})) - set(backward.facts)
        assert not unknown, f"facts {backward.name} does not have"
    for written in toy.mutates:
        assert written.partition(".")[0] in toy.signature.parameters


def everything() -> Snapshot:
    """A backend that implements every operator with whatever is asked, and answers with the operator's shapes."""
    made = [Implementation(f"{n}@{o.version}", n, target(o.shape)) for n, o in OPERATORS.items()]
    return Snapshot({"all": InstalledBackend(Manifest("all", 1, tuple(made)), "all", "1")})


@pytest.mark.parametrize("call", HERE, ids=repr)
def test_pieces_are_calls_that_their_operators_understand(manager: OpManager, call: Call) -> None:
    facts = read(manager, call)
    snapshot = everything()
    for recorded in (False, True):
        resolver: Any = resolve_recorded if recorded else resolve
        decision = resolver(OPERATORS[call.op], facts, CPU, Policy(), snapshot)
        decision = decision[0] if recorded else decision
        for accepted in decision.accepted:
            for name, piece in accepted.pieces.items():
                unknown = {n for n in piece.call if n not in OPERATORS[piece.operator].facts}
                # Inherited names that the piece's operator lacks are never asked for.
                own = {n for n in unknown if n not in OPERATORS[call.op].facts}
                assert not own, (name, own)
            if accepted.pieces:
                decomposition = next(
                    d for d in OPERATORS[call.op].decompositions if f"{COMPOSITE}.{d.name}" == accepted.id
                )
                built = decomposition.build(**dict.fromkeys(accepted.pieces, lambda *a: None))
                taken = [p.name for p in inspect.signature(built).parameters.values()]
                assert taken == list(OPERATORS[call.op].signature.parameters)


@pytest.mark.parametrize(("op", "backward"), [("attention_fwd", False), ("attention_bwd", True)])
def test_attention_is_taken_apart_alike_whether_its_facts_are_recorded_or_not(
    manager: OpManager, op: str, backward: bool
) -> None:
    call = next(c for c in HERE if c.op == op)
    facts = {**read(manager, call), **({"saved": "composite.unfused_attention"} if backward else {})}
    composite, _ = resolve_recorded(OPERATORS[op], facts, CPU, Policy(), everything())
    (accepted,) = [a for a in composite.accepted if a.pieces]
    assert set(accepted.pieces) == {"softmax_fwd", "gemm"} | ({"softmax_bwd"} if backward else set())


def test_a_parameter_that_no_fact_covers_is_refused_where_the_operator_is_declared() -> None:
    with pytest.raises(ValueError, match="no fact covers the parameters extra"):

        @operator(family="x", version=1, shape=lambda x, extra: x, device="x.device")
        def forgetful(x: torch.Tensor, extra: Sequence[torch.Tensor]) -> None:
            """Forgets a parameter."""

    with pytest.raises(ValueError, match="gemm is declared twice"):

        @operator(family="x", version=1, shape=lambda x: x, device="x.device")
        def gemm(x: torch.Tensor) -> None:
            """A second one."""

    with pytest.raises(ValueError, match="a fact is declared twice"):

        @operator(family="x", version=1, shape=lambda x: x, device="x.device", sizes={"k": "1"}, options=("k",))
        def double(x: torch.Tensor) -> None:
            """The same fact twice."""

    with pytest.raises(ValueError, match=r"odd: got the annotation 'object' for x, expected one of torch.Tensor, "):

        @operator(family="x", version=1, shape=lambda x: x, device="x.device")
        def odd(x: object) -> None:
            """Nobody knows what it takes."""


def test_dtypes_are_named_as_policies_spell_them() -> None:
    assert [dtype_name(d) for d in (torch.bfloat16, torch.float32, torch.float16, torch.uint8, "e4m3fn", None)] == [
        "bf16", "fp32", "fp16", "uint8", "e4m3fn", None,
    ]  # fmt: skip


@pytest.mark.parametrize(("raw", "canonical"), [(1, True), (0, False), (True, True), (None, None)])
def test_a_boolean_option_reads_the_same_whether_it_is_given_as_a_number(raw: Any, canonical: Any) -> None:
    """A table's key cannot tell 1 from True: were their facts different, the first call would decide for both."""
    assert OPERATORS["gemm"].facts["accumulate"].canonical(raw) is canonical
    assert OPERATORS["gemm"].facts["split_accumulator"].boolean
    assert Fact("block", "block").canonical(1) == 1 and not OPERATORS["partial_amax"].facts["block"].boolean


def test_default_facts_are_those_of_a_call_that_gives_nothing(manager: OpManager) -> None:
    for call in (c for c in HERE if not c.kwargs):
        seen = read(manager, call)
        for name, value in OPERATORS[call.op].default_facts().items():
            if name in seen and OPERATORS[call.op].facts[name].kind != "size":
                parameter = OPERATORS[call.op].signature.parameters.get(name.partition(".")[0])
                if parameter is not None and bound(call)[parameter.name] is parameter.default:
                    assert seen[name] == value, (call.op, name)
