# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The derived bounds are neither too wide nor too narrow: wrong results are outside of them, right ones near them.

Each mutation is a result that some class of kernel bug gives. It is judged by the rules of the cases of level full, as
an implementation's result would be, and at least one case has to reject it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.sampled(5)

torch = pytest.importorskip("torch")
pytest.importorskip("te_dispatch_reference")
pytest.importorskip("te_dispatch_torch")

from te_dispatch.conformance.bounds.gemm import accumulation  # noqa: E402
from te_dispatch.conformance.case import Case  # noqa: E402
from te_dispatch.conformance.casting import values as operand_values  # noqa: E402
from te_dispatch.conformance.families.huge_rows import sampled_rows  # noqa: E402
from te_dispatch.conformance.maker import Maker  # noqa: E402
from te_dispatch.conformance.oracle import Oracle  # noqa: E402
from te_dispatch.conformance.outputs import named_results  # noqa: E402
from te_dispatch.conformance.rules import judge  # noqa: E402
from te_dispatch.conformance.selection import cases_of  # noqa: E402
from te_dispatch.conformance.space import Judged, find  # noqa: E402
from te_dispatch.conformance.subject import subjects  # noqa: E402
from te_dispatch.core import scopes  # noqa: E402
from te_dispatch.core.operator import OPERATORS  # noqa: E402
from te_dispatch.numerics.quantized import Quantized  # noqa: E402

Arguments = dict[str, Any]
#: Makes a wrong result's tensors out of a call's arguments and its right ones; None where the bug does not show.
Mutation = Callable[[Arguments, dict[str, Any]], "dict[str, Any] | None"]

#: Cases of a space that a test looks at, unless it needs others.
CASES = 60


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(scopes.MANAGER)


def _torch_results(case: Case, arguments: Arguments) -> tuple[dict[str, Any], frozenset[str]] | None:
    operator = OPERATORS[case.operator]
    for subject in subjects(scopes.MANAGER, operator, torch.device("cpu"), "torch"):
        if subject.claim(arguments).refusal is None:
            return named_results(operator, subject.call(arguments), arguments), subject.traits
    return None


def _judged(case: Case, oracle: Oracle, change: Mutation | None) -> dict[str, float] | None:
    """Error over bound by path, of a right or of a changed result."""
    space = find(case.operator, case.space)

    def make() -> Arguments:
        return space.make(case.values, Maker(case, scopes.MANAGER))

    made = _torch_results(case, make())
    if made is None:
        return None
    actual, traits = made
    if change is not None:
        changed = change(make(), {path: tensor.clone() for path, tensor in actual.items()})
        if changed is None:
            return None
        actual = changed
    expected = oracle.results(space, case, make)
    rules = space.rules(Judged(case.values, make(), expected, actual, traits, frozenset()))
    return {path: judge(path, rules[path], tensor, expected[path]).ratio for path, tensor in actual.items()}


def _rejected(operator: str, space: str, oracle: Oracle, change: Mutation, **wanted: str) -> bool:
    """Whether some case of level full tells the mutated result from a right one."""
    cases = cases_of(find(operator, space), "full")
    chosen = [case for case in cases if all(case.values[axis] == value for axis, value in wanted.items())]
    for case in chosen[:CASES]:
        ratios = _judged(case, oracle, change)
        if ratios is not None and max(ratios.values(), default=0.0) > 1:
            return True
    return False


def _operands(arguments: Arguments) -> tuple[Any, Any]:
    layout = arguments["layout"]
    a, b = operand_values(arguments["a"]), operand_values(arguments["b"])
    return (a.t() if layout[0] == "T" else a), (b.t() if layout[1] == "T" else b)


def _simple(arguments: Arguments) -> bool:
    """Nothing but the product, so that a mutation is the whole result."""
    return arguments.get("bias") is None and not arguments.get("accumulate")


def _product_by(compute: Callable[[Any, Any], Any]) -> Mutation:
    def change(arguments: Arguments, actual: dict[str, Any]) -> dict[str, Any] | None:
        if not _simple(arguments) or arguments.get("epilogue"):
            return None
        a, b = _operands(arguments)
        z = compute(a, b) * arguments.get("alpha", 1.0)
        return {"out": z.reshape(actual["out"].shape).to(actual["out"].dtype)}

    return change


def _tf32(x: Any) -> Any:
    """Rounded to 11 significant bits."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp((fraction * 2048).round() / 2048, exponent)


def _chained(a: Any, b: Any, keep: Callable[[Any], Any]) -> Any:
    """The sum over k one product at a time, the accumulator cut by `keep` after each."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for k in range(a.shape[1]):
        total = keep(total + a[:, k : k + 1] * b[k : k + 1])
    return total


def _cut_14_bits(x: Any) -> Any:
    fraction, exponent = torch.frexp(x)
    return torch.ldexp((fraction * 2**14).trunc() / 2**14, exponent)


GEMM_MUTATIONS: dict[str, tuple[Mutation, dict[str, str]]] = {
    "last k dropped": (_product_by(lambda a, b: a[:, :-1] @ b[:-1]), {}),
    "TF32 operands": (_product_by(lambda a, b: _tf32(a) @ _tf32(b)), {"dtype": "fp32"}),
    "bf16 accumulation": (_product_by(lambda a, b: _chained(a, b, lambda x: x.bfloat16().double())), {"dtype": "bf16"}),
    "fp16 accumulation": (_product_by(lambda a, b: _chained(a, b, lambda x: x.half().double())), {"dtype": "fp16"}),
    "alpha ignored": (lambda given, actual: {"out": actual["out"] / given.get("alpha", 1.0)}, {"alpha": "-0.5"}),
    "transposed result": (_product_by(lambda a, b: (a @ b).t().contiguous()), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", GEMM_MUTATIONS)
def test_a_wrong_product_is_outside_its_bound(name: str, oracle: Oracle) -> None:
    change, wanted = GEMM_MUTATIONS[name]
    assert _rejected("gemm", "plain", oracle, change, **wanted)


def test_fast_accumulation_is_no_split_accumulation(oracle: Oracle) -> None:
    """14 bits over the whole of k = 4096 are outside the bound that sums of split partial sums have, and inside the one
    of fast accumulation."""
    change = _product_by(lambda a, b: _chained(a, b, _cut_14_bits))
    for mode, caught in (("fp8-split", True), ("fp8-fast", False)):
        case = next(c for c in cases_of(find("gemm", "long"), "full") if c.values["mode"] == mode)
        space = find("gemm", "long")
        arguments = space.make(case.values, Maker(case, scopes.MANAGER))
        assert isinstance(arguments["a"], Quantized) and case.values["values"] == "one_sign"
        made = _torch_results(case, arguments)
        assert made is not None
        actual = change(arguments, made[0])
        assert actual is not None
        expected = oracle.results(space, case, lambda: arguments)  # noqa: B023  # used before the next round
        rule = space.rules(Judged(case.values, arguments, expected, actual))["out"]
        assert judge("out", rule, actual["out"], expected["out"]).passed is not caught


def test_split_is_between_full_and_fast() -> None:
    for k in (16, 128, 4096):
        assert accumulation(k, "fp32") < accumulation(k, "split") <= accumulation(k, "fast")


def _scaled(path: str, factor: float) -> Mutation:
    def change(arguments: Arguments, actual: dict[str, Any]) -> dict[str, Any] | None:
        return {**actual, path: (actual[path].double() * factor).to(actual[path].dtype)} if path in actual else None

    return change


def _one_tile_off(path: str) -> Mutation:
    """The first 16 elements of the last row are 16 ulp of the result's dtype too large."""

    def change(arguments: Arguments, actual: dict[str, Any]) -> dict[str, Any] | None:
        if path not in actual or not actual[path].numel():
            return None
        found = actual[path].clone()
        found.reshape(-1, found.shape[-1])[-1, :16] *= 1 + 16 * torch.finfo(found.dtype).eps
        return {**actual, path: found}

    return change


def _dropped_row(path: str) -> Mutation:
    def change(arguments: Arguments, actual: dict[str, Any]) -> dict[str, Any] | None:
        if path not in actual or actual[path].dim() < 2 or not actual[path].numel():
            return None
        found = actual[path].clone()
        found[..., -1, :] = 0
        return {**actual, path: found}

    return change


def _from_other(operator: str, changed: Callable[[Arguments], Arguments]) -> Mutation:
    """The right result of other arguments."""

    def change(arguments: Arguments, actual: dict[str, Any]) -> dict[str, Any] | None:
        made = subjects(scopes.MANAGER, OPERATORS[operator], torch.device("cpu"), "torch")[0].call(changed(arguments))
        return {**actual, **named_results(OPERATORS[operator], made, arguments)}

    return change


def _next_code(path: str) -> Mutation:
    def change(arguments: Arguments, actual: dict[str, Any]) -> dict[str, Any] | None:
        if path not in actual or not actual[path].numel():
            return None
        found = actual[path].clone()
        found[found & 0x7F < 0x70] += 1
        return {**actual, path: found}

    return change


#: Operator, space, what is wrong, how, and axis values that the cases are limited to.
MUTATIONS: list[tuple[str, str, str, Mutation, dict[str, str]]] = [
    ("gemm", "plain", "tile off", _one_tile_off("out"), {}),
    ("gemm", "epilogue", "codes off by one", _next_code("out.row_data"), {}),
    ("gemm", "epilogue", "dbias off", _scaled("dbias", 1.02), {}),
    ("gemm", "epilogue", "aux is the output", lambda a, r: {**r, "aux": r["out"]} if "aux" in r else None, {}),
    ("gemm", "quantized", "tile off", _one_tile_off("out"), {}),
    ("grouped_gemm", "plain", "tile off", _one_tile_off("0"), {}),
    ("layernorm_fwd", "plain", "tile off", _one_tile_off("y"), {}),
    ("layernorm_fwd", "plain", "eps ignored", _from_other("layernorm_fwd", lambda a: {**a, "eps": 0.0}), {}),
    ("layernorm_fwd", "plain", "unbiased variance", _scaled("rstd", (256 / 257) ** 0.5), {}),
    ("layernorm_fwd", "plain", "codes off by one", _next_code("y_quantized.row_data"), {}),
    ("layernorm_fwd", "residual", "sum truncated", _one_tile_off("residual_out"), {}),
    ("layernorm_bwd", "plain", "tile off", _one_tile_off("dx"), {}),
    ("layernorm_bwd", "plain", "dbeta off", _scaled("dbeta", 1.02), {}),
    ("layernorm_bwd", "plain", "add ignored", _from_other("layernorm_bwd", lambda a: {**a, "add": None}), {}),
    ("rmsnorm_fwd", "plain", "gamma not centred",
     _from_other("rmsnorm_fwd", lambda a: {**a, "zero_centered_gamma": False}), {}),
    ("rmsnorm_bwd", "plain", "dgamma off", _scaled("dgamma", 1.02), {}),
    ("activation_fwd", "plain", "tile off", _one_tile_off("out"), {}),
    ("activation_fwd", "plain", "codes off by one", _next_code("out_quantized.row_data"), {}),
    ("activation_fwd", "plain", "params ignored", _from_other("activation_fwd", lambda a: {**a, "params": None}),
     {"kind": "clamped_swiglu"}),
    ("activation_bwd", "plain", "tile off", _one_tile_off("dx"), {}),
    ("activation_bwd", "plain", "dbias off", _scaled("dbias", 1.02), {}),
    ("softmax_fwd", "plain", "scale ignored", _from_other("softmax_fwd", lambda a: {**a, "scale": 1.0}), {}),
    ("softmax_fwd", "plain", "mask ignored", _from_other("softmax_fwd", lambda a: {**a, "mask": None}), {}),
    ("softmax_fwd", "plain", "last row unwritten", _dropped_row("result"), {}),
    ("softmax_fwd", "plain", "tile off", _one_tile_off("result"), {}),
    ("softmax_bwd", "plain", "tile off", _one_tile_off("result"), {}),
    ("rope_fwd", "dense", "tile off", _one_tile_off("result"), {}),
    ("rope_fwd", "dense", "wrong pairing", _from_other("rope_fwd", lambda a: {**a, "interleaved": False}), {}),
    ("rope_fwd", "thd", "offsets ignored", _from_other("rope_fwd", lambda a: {**a, "offsets": None}), {}),
    ("rope_bwd", "dense", "rotated forward",
     lambda a, r: {"result": subjects(scopes.MANAGER, OPERATORS["rope_fwd"], torch.device("cpu"), "torch")[0].call(
         {"x" if n == "dy" else n: v for n, v in a.items()})}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "space", "change", "wanted"),
    [(operator, space, change, wanted) for operator, space, _, change, wanted in MUTATIONS],
    ids=[f"{operator}-{what.replace(' ', '-')}" for operator, _, what, _, _ in MUTATIONS],
)
def test_a_wrong_result_is_outside_its_bound(
    operator: str, space: str, change: Mutation, wanted: dict[str, str], oracle: Oracle
) -> None:
    assert _rejected(operator, space, oracle, change, **wanted)


MAIN = [
    ("gemm", "plain", "out"), ("gemm", "epilogue", "out"), ("gemm", "epilogue", "aux"), ("gemm", "epilogue", "dbias"),
    ("gemm", "quantized", "out"), ("grouped_gemm", "plain", "0"),
    ("layernorm_fwd", "plain", "y"), ("layernorm_fwd", "plain", "mean"), ("layernorm_fwd", "plain", "rstd"),
    ("layernorm_bwd", "plain", "dx"), ("layernorm_bwd", "plain", "dgamma"), ("layernorm_bwd", "plain", "dbeta"),
    ("rmsnorm_fwd", "plain", "y"), ("rmsnorm_fwd", "plain", "rstd"), ("rmsnorm_bwd", "plain", "dx"),
    ("rmsnorm_bwd", "plain", "dgamma"), ("activation_fwd", "plain", "out"), ("activation_bwd", "plain", "dx"),
    ("activation_bwd", "plain", "dbias"), ("softmax_fwd", "plain", "result"), ("softmax_bwd", "plain", "result"),
    ("rope_fwd", "dense", "result"), ("rope_bwd", "dense", "result"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "space", "path"), MAIN, ids=[f"{o}-{p}" if s == "plain" else f"{o}-{s}-{p}" for o, s, p in MAIN]
)
def test_the_bound_is_met_and_not_idle(operator: str, space: str, path: str, oracle: Oracle) -> None:
    """On plain data, the worst error of plain PyTorch is inside the bound, and at least a hundredth of it."""
    found = []
    for case in cases_of(find(operator, space), "full"):
        if case.values["values"] in ("normal", "one_sign", "spread", "outlier"):
            ratios = _judged(case, oracle, None)
            if ratios is not None and path in ratios:
                found.append(ratios[path])
    print(f"{operator} {path}: {len(found)} cases, worst error {max(found):.3g} of the bound")
    assert 0.01 <= max(found) <= 1


#: As level soak's, but small: whatever the size, the same rows are looked at.
SMALL = {
    "gemm": "129x40x16", "layernorm_fwd": "129x40", "rmsnorm_fwd": "129x40", "activation_fwd": "129x40",
    "softmax_fwd": "129x40", "rope_fwd": "129x4x8",
}  # fmt: skip


@pytest.mark.parametrize("operator", SMALL)
def test_rows_sampled_of_a_huge_result_are_judged(operator: str, oracle: Oracle) -> None:
    case = Case(operator, "huge", (("shape", SMALL[operator]),))
    right = _judged(case, oracle, None)
    assert right is not None and max(right.values()) <= 1
    path = {"gemm": "out", "activation_fwd": "out", "layernorm_fwd": "y", "rmsnorm_fwd": "y"}.get(operator, "result")
    wrong = _judged(case, oracle, _one_tile_off(path))
    assert wrong is not None and wrong[path] > 1


def test_the_sample_of_rows_lies_around_the_31_bit_edge() -> None:
    rows = set(sampled_rows(70001, 32768).tolist())
    assert {0, 70000, 2**16 - 1, 2**16, 2**16 + 1} <= rows
