# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What dynamo traces in place of the trampolines: the choice of an implementation as constants and guards.

A trampoline's code and tables change as calls are made, and it reads a context variable; a graph must depend on
neither. Its substitute reads the bindings in force and the facts that resolution asks for, which become guards, and
then calls the bound implementation, inlined or through `te_dispatch::launch` (`_inlined_on`).

The functions marked as constant run outside the trace. They take and return strings and plain values only.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from operator import index
from typing import Any

from te_dispatch import ops
from te_dispatch.core import codegen, scopes
from te_dispatch.core.bindings import Bindings
from te_dispatch.core.decision import Accepted
from te_dispatch.core.dispatcher import Dispatcher, Part
from te_dispatch.core.errors import BindError, Declined, DispatchError, NoImplementation
from te_dispatch.core.manifest import CANONICAL
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.core.policy.model import Numerics
from te_dispatch.core.requirements import MultipleOf
from te_dispatch.core.resolve import COMPOSITE
from te_dispatch.core.scopes import MANAGER
from te_dispatch.core.tables import Atom, atom_expression
from te_dispatch.core.watched import reload_changed
from te_dispatch.pytorch.compile import hook
from te_dispatch.pytorch.compile.asking import Answers, Lacking, decide
from te_dispatch.pytorch.compile.hook import constant
from te_dispatch.pytorch.compile.launch import Opaque, make_opaque
from te_dispatch.pytorch.export.mode import is_in_onnx_export_mode

#: Opaque whatever their traits: as tensor code, inductor computes wrong scales (docs/torch_compile.md).
_ALWAYS_OPAQUE = frozenset(("update_delayed_scales",))

#: They copy elements and round nothing, so that no compiler can change their bits.
_ONLY_MOVE = frozenset(("moe_permute", "pad_rows", "relayout_scales", "transpose_quantized", "unpad_rows"))

_SHARED_MIRROR = (
    "torch.compile: a scoped policy was entered in an asyncio task of this thread, and a compiled graph cannot tell "
    "tasks apart; compile in another thread, or use te_dispatch.set_policy instead of scopes"
)

_NOT_BY_DYNAMO = (
    "onnx_export: this graph is made by dynamo, which records no operators of ONNX; give torch.onnx.export the module, "
    "or what torch.export.export makes of it with strict=False"
)

#: Answers of `_inlined_on`.
EVERY_DEVICE, CPU, NO_DEVICE = "every", "cpu", "none"


class _Named:
    """Functions by name. Attributes, not a dict: dynamo would guard on a dict's length, which grows."""


_readers = _Named()
_bound = _Named()
_shapes = _Named()

_atoms: dict[str, Atom] = {}
_reader_names: dict[tuple[str, Atom], str] = {}
#: Candidates and their names in `_bound`.
_bound_names: dict[str, str] = {}
#: By identity of the function that each keeps alive.
_hidden: dict[int, Opaque] = {}


def bindings_in_force() -> Bindings:
    """Traced in place of `scopes.capture`."""
    _reload_environment()
    mirror = MANAGER.mirror
    if mirror.shared:
        _refuse_shared()
    bindings = mirror.bindings
    return MANAGER.bindings if bindings is None else bindings


@constant
def _reload_environment() -> bool:
    """Read variables again that were set since: what is traced now goes by them, as an eager call does.

    Called before each look at the process's bindings. So the first call of a trace finds what has changed, before the
    trace depends on anything, and the later ones find nothing: bindings that changed while the trace lasts would fail
    its guards.

    Raises:
        PolicyError: a value that cannot be read.
    """
    reload_changed(MANAGER)
    return True


@constant
def _refuse_shared() -> None:
    raise DispatchError(_SHARED_MIRROR)


def _policy_numerics() -> Numerics:
    """Traced in place of `ops.policy_numerics`: reading a policy for the first time merges layers, under a lock."""
    portability, deterministic = _numerics(bindings_in_force().token)
    return Numerics(portability, deterministic)


@constant
def _numerics(token: str) -> tuple[str | None, bool | None]:
    numerics = MANAGER.tokens[token].policy.numerics
    return numerics.fp8_portability, numerics.deterministic


def _dispatch(name: str, args: tuple[Any, ...]) -> Any:
    """A call of the operator `name`. Runs under dynamo only."""
    token = bindings_in_force().token
    device = getattr(_readers, name + "_device")(*args)
    if device.type == "meta":
        return getattr(_shapes, name)(*args)
    answers: tuple[tuple[str, Any], ...] = ()
    declined: tuple[str, ...] = ()
    while True:
        verdict = _ask(name, token, device.type, device.index, answers, declined)
        if verdict[0] == "?":
            reader = verdict[1:]
            answers = (*answers, (reader, getattr(_readers, reader)(*args)))
        else:
            try:
                return getattr(_bound, verdict)(*args)
            except Declined:
                declined = (*declined, verdict)


@constant
def _ask(
    name: str,
    token: str,
    device_type: str,
    device_index: int | None,
    answers: tuple[tuple[str, Any], ...],
    declined: tuple[str, ...],
) -> str:
    """The implementation for a call, as a name in `_bound`; or ``?`` and the name of a reader of what decides it.

    Raises:
        NoImplementation: nothing is left; the message is the decision's table.
    """
    if is_in_onnx_export_mode():
        raise DispatchError(_NOT_BY_DYNAMO)
    operator = OPERATORS[name]
    bindings = MANAGER.tokens[token]
    known: Answers = {_atoms[reader]: value for reader, value in answers}
    device = MANAGER.device_facts(_Device(device_type, device_index))
    try:
        with MANAGER.lock:
            chosen, accepted, function = choose(operator, known, device, bindings, declined, _unsampled)
            _hide(bindings.dispatcher(operator), accepted)
            setattr(_bound, chosen, function)
            return chosen
    except Lacking as lacking:
        return "?" + _reader(operator, lacking.atom)


class _Device:
    """What `OpManager.device_facts` reads of a ``torch.device``."""

    def __init__(self, type: str, index: int | None) -> None:
        self.type = type
        self.index = index


def read(operator: Operator, atom: Atom, args: tuple[Any, ...]) -> Any:
    """A fact of a call, or the truth of a condition on one, which a symbolic value is guarded for."""
    return getattr(_readers, _reader(operator, atom))(*args)


def _reader(operator: Operator, atom: Atom) -> str:
    """The name in `_readers` of a function that reads `atom` off a call's arguments."""
    found = _reader_names.get((operator.name, atom))
    if found is None:
        fact, condition = atom
        expression = atom_expression(operator, atom)
        if isinstance(condition, MultipleOf):  # without the bit trick, which symbolic sizes do not take
            expression = f"({operator.facts[fact].expression} % {condition.factor} == 0)"
        # Both make a guard of a symbolic value.
        if condition is not None or isinstance(ast.parse(expression, mode="eval").body, (ast.Compare, ast.BoolOp)):
            expression = f"(True if {expression} else False)"
        elif operator.facts[fact].kind == "size":
            expression = f"_index({expression})"
        found = f"{operator.name}_{len(_reader_names)}"
        setattr(_readers, found, codegen.reader(operator, MANAGER.namespace, expression, "traced"))
        _atoms[found] = atom
        _reader_names[operator.name, atom] = found
    return found


def choose(
    operator: Operator, known: Answers, device: Any, bindings: Bindings, declined: tuple[str, ...], part: Part
) -> tuple[str, Accepted, Callable[..., Any]]:
    """The candidate for a call of which facts are known, and a callable for it. The caller holds the manager's lock.

    Args:
        declined: names of the candidates that have declined the call already.
        part: see `Dispatcher.bind`.

    Returns:
        Its name for `declined`, the candidate, the callable.

    Raises:
        Lacking: a further fact decides; NoImplementation: nothing is left; DispatchError: a backward declined.
    """
    while True:
        snapshot = MANAGER.snapshot
        decision = decide(operator, known, device, bindings.policy, snapshot)
        left = [accepted for accepted in decision.accepted if _name(operator, bindings, accepted) not in declined]
        if not left:
            full = {short: text for text, short in _bound_names.items()}
            gone = "".join(f"\n  {full[one]}  declined while tracing" for one in declined)
            raise NoImplementation(decision.table() + gone)
        if declined and operator.backward:
            raise DispatchError(f"{declined[0]} declined a backward; a backward's conditions belong in its manifest")
        try:
            function = bindings.dispatcher(operator).bind(left[0], part)
        except BindError:
            continue
        if MANAGER.snapshot is snapshot:
            MANAGER.announce(decision)
            return _name(operator, bindings, left[0]), left[0], function


def _name(operator: Operator, bindings: Bindings, accepted: Accepted) -> str:
    """A candidate's name in `_bound`: an identifier, since dynamo takes no other attributes."""

    def tree(accepted: Accepted) -> str:
        pieces = [f"{name}={piece.chosen and tree(piece.chosen)}" for name, piece in accepted.pieces.items()]
        return f"{accepted.id}({', '.join(pieces)})" if pieces else accepted.id

    # A composite's pieces fall back under its own bindings.
    where = f" under {bindings.token}" if accepted.pieces else ""
    text = f"{operator.name} {tree(accepted)}{where}"
    return _bound_names.setdefault(text, f"{operator.name}_{len(_bound_names)}")


def _unsampled(dispatcher: Dispatcher, accepted: Accepted) -> Callable[..., Any]:
    """A `Part` of what graphs are traced from: no call is compared, and no result checked."""
    return MANAGER.functions.bound(dispatcher.operator, accepted.id)


def _hide(dispatcher: Dispatcher, accepted: Accepted) -> None:
    """Keep dynamo out of the implementations of a candidate that it cannot or must not trace."""
    if accepted.pieces:
        for piece in accepted.pieces.values():
            assert piece.chosen is not None
            _hide(dispatcher.bindings.dispatcher(OPERATORS[piece.operator]), piece.chosen)
        return
    operator = dispatcher.operator
    if accepted.id.startswith(f"{COMPOSITE}."):
        return
    inlined = _inlined_on(operator, accepted.traits)
    if inlined == EVERY_DEVICE:
        return
    hidden(operator, accepted, inline_on_cpu=inlined == CPU)


def hidden(operator: Operator, accepted: Accepted, inline_on_cpu: bool = False) -> Opaque:
    """An implementation as graphs call it without looking into it.

    Args:
        inline_on_cpu: see `make_opaque`; what is asked first holds.
    """
    function = MANAGER.functions.bound(operator, accepted.id)
    found = _hidden.get(id(function))
    if found is None:
        _, implementation = MANAGER.snapshot.implementation(accepted.id)
        found = _hidden[id(function)] = make_opaque(
            function,
            operator,
            accepted.id,
            f"{implementation.version}@{accepted.version}",
            implementation.saved_format or CANONICAL,
            MANAGER.functions.declared(accepted.id, "output_shape"),
            inline_on_cpu=inline_on_cpu,
        )
    return found


def _inlined_on(operator: Operator, traits: Collection[str]) -> str:
    """The devices on which graphs take an implementation apart: `EVERY_DEVICE`, `CPU` or `NO_DEVICE`.

    A compiler that generates code for an accelerator is free to contract a product and a sum into one rounding, to
    divide and to evaluate exp and tanh by other approximations, and to keep more digits between two operations. Eager
    does none of it. So an implementation that computes is a call there, unless PyTorch's own fused kernel does it.
    """
    if "plain_torch" not in traits or operator.name in _ALWAYS_OPAQUE:
        return NO_DEVICE
    return EVERY_DEVICE if "fused" in traits or operator.name in _ONLY_MOVE else CPU


def _install() -> None:
    MANAGER.namespace.__dict__["_index"] = index
    namespace = codegen.new_namespace("traced")
    namespace.__dict__["_dispatch"] = _dispatch
    for name, operator in OPERATORS.items():
        reader = codegen.reader(operator, MANAGER.namespace, operator.device, "device")
        setattr(_readers, name + "_device", reader)
        setattr(_shapes, name, codegen.reader(operator, MANAGER.namespace, _shape_call(operator), "shape"))
        hook.substitute(getattr(MANAGER.ops, name), codegen.forwarder(operator, namespace, "_dispatch"))
    hook.substitute(scopes.capture, bindings_in_force)
    hook.substitute(ops.policy_numerics, _policy_numerics)


def _shape_call(operator: Operator) -> str:
    variable = f"_{operator.name}_shape"
    MANAGER.namespace.__dict__[variable] = operator.shape
    return f"{variable}({', '.join(f'{name}={name}' for name in operator.signature.parameters)})"


_install()
