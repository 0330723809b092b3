# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Policy layers that environment variables and ``te_dispatch.using`` ask for.

Nothing here reads ``os.environ``: the caller passes it, at the first resolution and on ``reload_environment()``.
A variable that is set to nothing counts as not set. A value that cannot be read is an error that names the variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from te_dispatch.core.errors import PolicyError
from te_dispatch.core.manifest import ORACLE
from te_dispatch.core.policy import TRAIT_PREFIX, Origin, Policy, Rule, Selector
from te_dispatch.core.policy.check import check_contradictions
from te_dispatch.core.policy.known import Known
from te_dispatch.core.requirements import Compare, Condition, OneOf

PREFER = "TE_DISPATCH_PREFER"
POLICY = "TE_DISPATCH_POLICY"

#: Transformer Engine's switch -> the trait of the attention that it switches: 0 takes that out; 1, the default, takes
#: nothing out. What has none of these traits (a Triton kernel, PyTorch's own but cuDNN) is a fast kernel like those of
#: the first two switches, and is out where both are 0. All three at 0 leave nothing.
ATTENTION_SWITCHES = {
    "NVTE_FLASH_ATTN": "flash_package",
    "NVTE_FUSED_ATTN": "vendor_library",
    "NVTE_UNFUSED_ATTN": "unfused",
}
_FAST = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
#: Switches of one FlashAttention package each -> how the names of its implementations end, but for ``_bwd``.
PACKAGE_SWITCHES = {"NVTE_FLASH_ATTN_V2": "_2", "NVTE_FLASH_ATTN_V3": "_3", "NVTE_FLASH_ATTN_V4": "_4"}
#: Switches of one library of AMD's each, of Transformer Engine for ROCm -> the trait of its attention.
LIBRARY_SWITCHES = {"NVTE_FUSED_ATTN_CK": "ck", "NVTE_FUSED_ATTN_AOTRITON": "aotriton"}
#: Switches of Transformer Engine for ROCm that choose its Triton kernels -> the operators that they serve.
TRITON_SWITCHES = {
    "NVTE_USE_CAST_TRANSPOSE_TRITON": ("quantize", "quantize_dbias"),
    "NVTE_USE_DEQUANTIZE_TRITON": ("dequantize",),
    "NVTE_USE_LAYERNORM_TRITON": ("layernorm_fwd", "layernorm_bwd"),
    "NVTE_USE_RMSNORM_TRITON": ("rmsnorm_fwd", "rmsnorm_bwd"),
}
FUSED_BACKEND = "NVTE_FUSED_ATTN_BACKEND"
NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
DEBUG = "NVTE_DEBUG"
DEBUG_LEVEL = "NVTE_DEBUG_LEVEL"

_ATTENTION = "attention"
_ON_AMD = (OneOf("device.vendor", "amd"),)
_HALF = OneOf("q.dtype", "bf16", "fp16")
_FP8 = OneOf("q.dtype", "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
#: Transformer Engine's numbers of cuDNN's sub-backends as the calls each of them serves.
FUSED_BACKENDS: Mapping[str, tuple[Condition, ...]] = {
    "0": (_HALF, Compare("seqlen_q", "<=", 512), Compare("seqlen_kv", "<=", 512)),
    "1": (_HALF,),
    "2": (_FP8,),
}


@dataclass(frozen=True)
class Debug:
    """Transformer Engine's debug variables.

    Attributes:
        enabled: ``NVTE_DEBUG=1``: say which attention was chosen, and why not the others.
        level: ``NVTE_DEBUG_LEVEL``: 0 warnings, 1 decisions, 2 every candidate with its reason.
    """

    enabled: bool = False
    level: int = 0


def environment_layers(environ: Mapping[str, str], known: Known) -> list[Policy]:
    """The layers the environment asks for, strongest first: ``TE_DISPATCH_PREFER``, ``TE_DISPATCH_POLICY``, then
    Transformer Engine's variables together.

    Args:
        environ: usually ``os.environ``.
        known: words of this machine.

    Raises:
        PolicyError: a value that cannot be read; names the variable, the value and what is expected.
    """
    layers = [_prefer_layer(environ, known), _policy_layer(environ, known), _transformer_engine_layer(environ, known)]
    return [layer for layer in layers if layer is not None]


def debug_setting(environ: Mapping[str, str]) -> Debug:
    """``NVTE_DEBUG`` and ``NVTE_DEBUG_LEVEL``.

    Raises:
        PolicyError: a value that is not 0 or 1 (level: 0, 1 or 2).
    """
    level = _one_of(environ, DEBUG_LEVEL, ("0", "1", "2"))
    return Debug(enabled=_one_of(environ, DEBUG, ("0", "1")) == "1", level=int(level or "0"))


def using_layer(
    known: Known,
    /,
    prefer: Mapping[str, str | Sequence[str]] | None = None,
    **require: str | Sequence[str],
) -> Policy:
    """The layer of ``with te_dispatch.using(...)``.

    Args:
        known: words of this machine.
        prefer: operator or family -> selector, or several in order: they come first, others stay eligible.
        require: the same, but nothing else is eligible; of several, any one.

    Raises:
        PolicyError: nothing is asked for, or a word is unknown.
    """
    shown = [f"{op}={value!r}" for op, value in require.items()] + ([f"prefer={prefer!r}"] if prefer else [])
    call = f"using({', '.join(shown)})"
    if not shown:
        raise PolicyError("using() asks for nothing; write using(gemm='triton') or using(prefer={'gemm': 'triton'})")
    required = [_rule(op, value, "require", call, known) for op, value in require.items()]
    preferred = [_rule(op, value, "prefer", call, known) for op, value in (prefer or {}).items()]
    layer = Policy(name=call, rules=(*required, *preferred), origin=Origin(call))
    check_contradictions(layer, known)
    return layer


def _rule(op: str, value: str | Sequence[str], key: str, source: str, known: Known) -> Rule:
    """One operator's preference or requirement, its words checked."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise PolicyError(
            f"{source}: {op} takes a backend's or implementation's name, or a list of them, got {value!r}"
        )
    problem = known.operator_problem(op)
    if problem:
        raise PolicyError(f"{source}: {problem}")
    pattern = op.partition("@")[0]
    spoken_of = known.with_companions(known.matched(pattern))
    for text in texts:
        problem = known.selector_problem(text, (), spoken_of)
        if problem:
            raise PolicyError(f"{source}: {op}: {problem}")
    origin = Origin(source)
    selectors = tuple(Selector(text, origin) for text in dict.fromkeys(texts))
    if key == "require":
        return Rule(op=pattern, require=selectors, origin=origin)
    return Rule(op=pattern, prefer=selectors, origin=origin)


def _value(environ: Mapping[str, str], variable: str) -> str | None:
    return environ.get(variable, "").strip() or None


def _one_of(environ: Mapping[str, str], variable: str, accepted: Sequence[str]) -> str | None:
    value = _value(environ, variable)
    if value is not None and value not in accepted:
        *head, last = accepted
        raise PolicyError(f"{variable}={value}: expected {', '.join(head)} or {last}, got {value!r}")
    return value


def _prefer_layer(environ: Mapping[str, str], known: Known) -> Policy | None:
    value = _value(environ, PREFER)
    if value is None:
        return None
    rules: list[Rule] = []
    for entry in filter(None, (part.strip() for part in value.split(";"))):
        op, equals, chosen = (part.strip() for part in entry.partition("="))
        texts = [text.strip() for text in chosen.split(",")]
        if not op or not equals or not all(texts):
            raise PolicyError(f"{PREFER}={value}: cannot read {entry!r}; expected operator=backend[,backend...][;...]")
        if any(rule.op == op.partition("@")[0] for rule in rules):
            raise PolicyError(f"{PREFER}={value}: {op!r} is given twice")
        rules.append(_rule(op, texts, "prefer", f"{PREFER}={value}", known))
    # Entries are no ordered list of rules to their writer: "gemm=triton;grouped_gemm=torch" must not depend on order.
    rules.sort(key=lambda rule: len(known.matched(rule.op)))
    return Policy(name=PREFER, rules=tuple(rules), origin=Origin(f"{PREFER}={value}"))


def _policy_layer(environ: Mapping[str, str], known: Known) -> Policy | None:
    value = _value(environ, POLICY)
    if value is None:
        return None
    from te_dispatch.core.policy.file import load_policy  # the YAML reader loads only where there is YAML to read

    try:
        return load_policy(value, known)
    except PolicyError as error:
        raise PolicyError(f"{POLICY}={value}: {error}") from None


def _transformer_engine_layer(environ: Mapping[str, str], known: Known) -> Policy | None:
    rules: list[Rule] = []
    off = [name for name in ATTENTION_SWITCHES if _one_of(environ, name, ("0", "1")) == "0"]
    rules += [_denial((f"{TRAIT_PREFIX}{ATTENTION_SWITCHES[name]}",), (name,)) for name in off]
    for name, ending in PACKAGE_SWITCHES.items():
        if _one_of(environ, name, ("0", "1")) == "0" and (packages := _of_package(ending, known)):
            rules.append(_denial(packages, (name,)))
    for name, trait in LIBRARY_SWITCHES.items():
        if _one_of(environ, name, ("0", "1")) == "0":
            rules.append(_denial((f"{TRAIT_PREFIX}{trait}",), (name,)))
    if set(_FAST) <= set(off):
        rules += [_denial(others, _FAST)] if (others := _of_no_switch(known)) else []
    if len(off) == len(ATTENTION_SWITCHES):
        rules.append(Rule(_ATTENTION, allow=(), origin=_at_0(off)))
    number = _one_of(environ, FUSED_BACKEND, tuple(FUSED_BACKENDS))
    if number is not None and "NVTE_FUSED_ATTN" not in off:
        origin = Origin(f"{FUSED_BACKEND}={number}")
        fused = (Selector(f"{TRAIT_PREFIX}vendor_library", origin),)
        rules.append(Rule(_ATTENTION, when=FUSED_BACKENDS[number], prefer=fused, origin=origin))
    if _one_of(environ, NONDETERMINISTIC, ("0", "1")) == "0":
        rules += _deterministic_attention(known)
    for name, operators in TRITON_SWITCHES.items():
        if _one_of(environ, name, ("0", "1")) == "1":
            origin = Origin(f"{name}=1")
            triton = (Selector("triton", origin),)
            rules += [Rule(operator, when=_ON_AMD, prefer=triton, origin=origin) for operator in operators]
    if not rules:
        return None
    source = ", ".join(dict.fromkeys(str(rule.origin) for rule in rules))
    return Policy(name="Transformer Engine's variables", rules=tuple(rules), origin=Origin(source))


def _at_0(variables: Sequence[str]) -> Origin:
    return Origin(", ".join(f"{variable}=0" for variable in variables))


def _denial(texts: Sequence[str], variables: Sequence[str]) -> Rule:
    origin = _at_0(variables)
    return Rule(_ATTENTION, deny=tuple(Selector(text, origin) for text in texts), origin=origin)


def _of_package(ending: str, known: Known) -> tuple[str, ...]:
    """Both halves of a FlashAttention package's attention, by id."""
    return tuple(
        name
        for name, traits in known.traits_of.items()
        if ATTENTION_SWITCHES["NVTE_FLASH_ATTN"] in traits and name.removesuffix("_bwd").endswith(ending)
    )


def _of_no_switch(known: Known) -> tuple[str, ...]:
    """Attention that no switch speaks of, by id; an oracle runs only where it is named anyway."""
    members = set(known.families.get(_ATTENTION, ()))
    spoken_of = {*ATTENTION_SWITCHES.values(), ORACLE}
    return tuple(
        name for name, traits in known.traits_of.items() if known.serves[name] & members and not traits & spoken_of
    )


def _deterministic_attention(known: Known) -> list[Rule]:
    """Deny by id what does not claim determinism: ``numerics.deterministic`` would speak of every operator, and
    Transformer Engine's variable speaks of attention alone."""
    origin = Origin(f"{NONDETERMINISTIC}=0")
    members = set(known.families.get(_ATTENTION, ()))
    denied = tuple(
        Selector(name, origin)
        for name, claims in known.claims.items()
        if known.serves[name] & members and "deterministic" not in claims
    )
    return [Rule(_ATTENTION, deny=denied, origin=origin)] if denied else []
