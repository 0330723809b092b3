# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A made-up world for tests of the dispatch core: a handful of operators, and backends built in memory.

The operators have every feature that dispatch knows (options, sizes, optional operands, companions with and without
saved state, decompositions) and no arithmetic. Implementations answer with their id, so that a test sees who ran.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from te_dispatch.core.discovery import register
from te_dispatch.core.facts import CallFacts, Derived, DeviceFacts, fact
from te_dispatch.core.manager import OpManager
from te_dispatch.core.manifest import API_VERSION, Implementation, Manifest
from te_dispatch.core.operator import OPERATORS, Operator, Piece, decomposes, operator
from te_dispatch.core.policy import Policy, Rule, Selector
from te_dispatch.core.snapshot import Snapshot

if TYPE_CHECKING:
    import torch

    from te_dispatch.numerics.quantized import Operand
    from te_dispatch.ops.results import Saved

TOYS: dict[str, Operator] = {}

CPU = DeviceFacts("cpu", "cpu", "cpu")


def _shape(*args: Any, **kwargs: Any) -> str:
    return "shape"


def _declare() -> None:
    """Declare the toys among themselves, leaving the real operators' table as it was."""

    @operator(
        family="mix",
        version=1,
        shape=_shape,
        device="a.device",
        options=("fast",),
        sizes={"k": "a.shape[-1]", "m": "a.shape[0]"},
        mutates=("out",),
    )
    def mix(
        a: Operand,
        b: torch.Tensor,
        *,
        mode: str = "plain",
        out: torch.Tensor | None = None,
        alpha: float = 1.0,
        fast: int | str | None = None,
    ) -> Any:
        """Two operands, options, an output that may be given."""

    @operator(family="pack", version=1, shape=_shape, device="x.device")
    def pack(x: torch.Tensor, *, kind: str = "tight") -> Any:
        """The last step of `fuse`."""

    def scan_backward(call: CallFacts) -> CallFacts:
        return Derived(call, {"dy.dtype": fact("x.dtype"), **{n: fact(n) for n in ("x.dtype", "causal", "k")}})

    @operator(
        family="scan",
        version=1,
        shape=_shape,
        device="x.device",
        sizes={"k": "x.shape[-1]"},
        companion="scan_bwd",
        companion_facts=scan_backward,
    )
    def scan_fwd(x: torch.Tensor, *, causal: bool = False, inference: bool = False) -> Any:
        """A forward whose backward needs what it saved."""

    @operator(
        family="scan",
        version=1,
        shape=_shape,
        device="x.device",
        sizes={"k": "x.shape[-1]"},
        companion="scan_fwd",
        backward=True,
        saved="saved.implementation",
    )
    def scan_bwd(dy: torch.Tensor, x: torch.Tensor, saved: Saved, *, causal: bool = False) -> Any:
        """The backward of `scan_fwd`."""

    def turn_backward(call: CallFacts) -> CallFacts:
        return Derived(call, {"dy.dtype": fact("x.dtype"), "flip": fact("flip")})

    @operator(
        family="turn",
        version=1,
        shape=_shape,
        device="x.device",
        sizes={"k": "x.shape[-1]"},
        companion="turn_bwd",
        companion_facts=turn_backward,
    )
    def turn_fwd(x: torch.Tensor, *, flip: bool = False) -> Any:
        """A forward whose results are all that its backward needs."""

    @operator(
        family="turn",
        version=1,
        shape=_shape,
        device="dy.device",
        companion="turn_fwd",
        backward=True,
    )
    def turn_bwd(dy: torch.Tensor, *, flip: bool = False) -> Any:
        """The backward of `turn_fwd`."""

    @operator(family="fuse", version=1, shape=_shape, device="x.device")
    def fuse(x: torch.Tensor, *, cast: str | None = None) -> Any:
        """A step that can carry a cast along."""

    def fuse_pieces(call: CallFacts) -> Mapping[str, Piece] | None:
        if call.get("cast") is None:
            return None
        plain = Piece("fuse", lambda c: Derived(c, {"cast": None, "cast.default": True}, inherit=True))
        return {"fuse": plain, "pack": Piece("pack", lambda c: Derived(c, {"x.dtype": "fp32", "kind": fact("cast")}))}

    @decomposes("fuse", pieces=fuse_pieces, simplifies=True)
    def fuse_then_pack(fuse, pack):  # type: ignore[no-untyped-def]
        def composed(x, *, cast=None):  # type: ignore[no-untyped-def]
            return ("fuse_then_pack", fuse(x, None), pack(x.float(), cast))

        return composed

    def spelled_pieces(call: CallFacts) -> Mapping[str, Piece] | None:
        if call.get("causal"):
            return None
        facts = {"b.dtype": fact("x.dtype"), "a.dtype": fact("x.dtype"), "k": fact("k"), "mode": "plain"}
        return {"mix": Piece("mix", lambda c: Derived(c, {**facts, "fast": None, "out": False}))}

    @decomposes("scan_fwd", pieces=spelled_pieces, materializes=True, label="spelled")
    def spelled_fwd(mix):  # type: ignore[no-untyped-def]
        def composed(x, *, causal=False, inference=False):  # type: ignore[no-untyped-def]
            return ("spelled", mix(x, x, "plain", None, 1.0, None))

        return composed

    @decomposes("scan_bwd", pieces=spelled_pieces, materializes=True, label="spelled")
    def spelled_bwd(mix):  # type: ignore[no-untyped-def]
        def composed(dy, x, saved, *, causal=False):  # type: ignore[no-untyped-def]
            return ("spelled", mix(dy, x, "plain", None, 1.0, None))

        return composed


@contextmanager
def only_toys() -> Iterator[None]:
    """Make the toys all the operators there are."""
    real = dict(OPERATORS)
    OPERATORS.clear()
    OPERATORS.update(TOYS)
    try:
        yield
    finally:
        OPERATORS.clear()
        OPERATORS.update(real)


with only_toys():
    _declare()
    TOYS.update(OPERATORS)

_serial = itertools.count()


def answering(op: str, answer: Any) -> Callable[..., Any]:
    """A function with an operator's exact signature that returns `answer`."""
    signature = OPERATORS[op].signature if op in OPERATORS else TOYS[op].signature
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    scope: dict[str, Any] = {"answer": answer}
    exec(f"def answering{inspect.Signature(bare)}:\n    return answer\n", scope)
    function: Callable[..., Any] = scope["answering"]
    return function


def target(value: Any) -> str:
    """``module:attribute`` of a value, in a module made for it."""
    module = ModuleType(f"te_dispatch_toy_targets_{next(_serial)}")
    module.__dict__["value"] = value
    sys.modules[module.__name__] = module
    return f"{module.__name__}:value"


def kernel(op: str, name: str, function: Any = None, **fields: Any) -> Implementation:
    """An implementation, of the operator's version 1 unless `op` says otherwise. Without a function it has none to
    import."""
    where = "te_dispatch_toy_nowhere:nothing" if function is None else target(function)
    return Implementation(op if "@" in op else f"{op}@1", name, fields.pop("target", where), **fields)


def backend(name: str, *implementations: Implementation, **fields: Any) -> Manifest:
    return Manifest(name, fields.pop("api_version", API_VERSION), implementations, **fields)


def extension(manifest: Any, name: str | None = None, distribution: str | None = None, version: str = "1.0") -> Any:
    """What stevedore would hand over for a manifest."""
    name = name or getattr(manifest, "name", "nameless")
    dist = SimpleNamespace(metadata={"Name": distribution or f"te-dispatch-{name}"}, version=version)
    return SimpleNamespace(entry_point=SimpleNamespace(name=name, dist=dist), plugin=manifest)


def installed(*manifests: Manifest) -> Snapshot:
    """A snapshot of manifests that must all pass discovery."""
    snapshot = register([extension(m) for m in manifests], OPERATORS)
    assert not snapshot.failures, snapshot.failures
    return snapshot


def manager(*manifests: Manifest, environ: Mapping[str, str] | None = None) -> OpManager:
    return OpManager(installed(*manifests), environ={} if environ is None else environ)


def answers(op: str, backends: Sequence[str], **fields: Any) -> list[Manifest]:
    """Backends that each implement one operator once, and answer with their name."""
    return [backend(name, kernel(op, "k", answering(op, name), **fields)) for name in backends]


def selectors(*texts: str) -> tuple[Selector, ...]:
    return tuple(Selector(text) for text in texts)


def preferring(*texts: str, **fields: Any) -> Policy:
    return Policy(name="test", prefer=selectors(*texts), **fields)


def rule(op: str, **fields: Any) -> Rule:
    for key in ("prefer", "allow", "deny", "require"):
        if fields.get(key) is not None:
            fields[key] = selectors(*fields[key])
    return Rule(op, **fields)
