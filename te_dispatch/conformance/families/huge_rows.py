# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products, norms, activations, softmax and rotary embedding on more elements than 31 bits count (level soak).

What they find is an index that overflows, so whole rows are judged: the first, the last, those around element 2^31, and
some between. A row's result is that of the same row alone, so the oracle is the family's own formula in float64
(`te_dispatch.conformance.bounds`) on these rows; so is the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.conformance.bounds import activation, norm, position, softmax
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.families.gemm import mode_of, product
from te_dispatch.conformance.families.quantize_huge import repeated
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.rules import Rule, Sampled
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Values, register
from te_dispatch.ops.results import ActivationForward, Gemm, NormForward

#: Repeated to fill an operand: a prime, that no row length divides.
_PERIOD = 1_048_573
_RANDOM_ROWS = 8


def sampled_rows(rows: int, columns: int) -> torch.Tensor:
    """Ascending; the same every time."""
    edge = 2**31 // max(columns, 1)
    drawn = torch.randint(0, rows, (_RANDOM_ROWS,), generator=torch.Generator().manual_seed(0)).tolist()
    wanted = {0, 1, rows - 2, rows - 1, edge - 1, edge, edge + 1, *drawn}
    return torch.tensor(sorted(row for row in wanted if 0 <= row < rows))


def _filled(maker: Maker, shape: tuple[int, ...]) -> torch.Tensor:
    return repeated(maker.tensor(_PERIOD, dtype="bf16"), shape)


def _sizes(values: Values) -> tuple[int, ...]:
    return tuple(int(size) for size in values["shape"].split("x"))


def _make_gemm(values: Values, maker: Maker) -> Arguments:
    m, n, k = _sizes(values)
    return {"a": _filled(maker, (m, k)), "b": _filled(maker, (n, k)), "layout": "NT"}


def _make_norm(values: Values, maker: Maker) -> Arguments:
    columns = _sizes(values)[1]
    arguments: Arguments = {"x": _filled(maker, _sizes(values)), "gamma": maker.tensor(columns, dtype="bf16")}
    return arguments | ({"beta": None} if maker.case.operator == "layernorm_fwd" else {})


def _make_rows(values: Values, maker: Maker) -> Arguments:
    x = _filled(maker, _sizes(values))
    return {"x": x, "kind": "gelu"} if maker.case.operator == "activation_fwd" else {"x": x, "scale": 0.125}


def _make_rope(values: Values, maker: Maker) -> Arguments:
    s, h, d = _sizes(values)
    angles = torch.arange(s, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    freqs = torch.cat((angles, angles), 1).float().reshape(s, 1, 1, d)
    return {"x": _filled(maker, (s, 1, h, d)), "freqs": freqs}


#: Path -> the rows' values, of the arguments and the sampled rows.
_Rows = Callable[[Mapping[str, Any], torch.Tensor, str], dict[str, Known]]


def _gemm_rows(arguments: Mapping[str, Any], rows: torch.Tensor, mode: str) -> dict[str, Known]:
    return {"out": product({**arguments, "a": arguments["a"][rows]}, mode)}


def _norm_rows(arguments: Mapping[str, Any], rows: torch.Tensor, mode: str) -> dict[str, Known]:
    x = Known.exactly(arguments["x"][rows])
    known = norm.forward(x, arguments["gamma"], None, 1e-5, False, centered="beta" in arguments)
    found = {"y": known.y, "rstd": known.rstd}
    return found | ({"mean": known.mean} if "beta" in arguments else {})


def _activation_rows(arguments: Mapping[str, Any], rows: torch.Tensor, mode: str) -> dict[str, Known]:
    return {"out": activation.forward(Known.exactly(arguments["x"][rows]), arguments["kind"], None)}


def _softmax_rows(arguments: Mapping[str, Any], rows: torch.Tensor, mode: str) -> dict[str, Known]:
    return {"result": softmax.forward(arguments["x"][rows], None, arguments["scale"])}


def _rope_rows(arguments: Mapping[str, Any], rows: torch.Tensor, mode: str) -> dict[str, Known]:
    angles = arguments["freqs"][rows]
    return {"result": position.rotated(arguments["x"][rows], angles, False, False)}


def _leading(arguments: Mapping[str, Any]) -> torch.Tensor:
    x: torch.Tensor = arguments["x"] if "x" in arguments else arguments["a"]
    return x


def _rows_sampled(arguments: Mapping[str, Any]) -> torch.Tensor:
    x = _leading(arguments)
    columns = arguments["b"].shape[0] if "b" in arguments else x.numel() // max(x.shape[0], 1)
    return sampled_rows(x.shape[0], columns)


def _result(found: dict[str, Known]) -> Any:
    values = {path: known.value.flatten().float() for path, known in found.items()}
    if "result" in values:
        return values["result"]
    if "y" in values:
        return NormForward(values["y"], None, None, values.get("mean"), values["rstd"])
    return values["out"]


def _oracle(of_rows: _Rows, wrap: Callable[[Any], Any]) -> Callable[[Arguments, Values], Any]:
    def expected(arguments: Arguments, values: Values) -> Any:
        return wrap(_result(of_rows(arguments, _rows_sampled(arguments), "fp32")))

    return expected


def _rules(of_rows: _Rows) -> Callable[[Judged], Mapping[str, Rule]]:
    def rules(judged: Judged) -> Mapping[str, Rule]:
        rows = _rows_sampled(judged.arguments)
        found: dict[str, Rule] = {}
        for path, known in of_rows(judged.arguments, rows, mode_of(judged) if "a" in judged.arguments else "").items():
            actual = judged.actual[path]
            width = actual.numel() // max(actual.shape[0], 1)
            places = (rows[:, None] * width + torch.arange(width)).flatten()
            found[path] = Sampled(places, within(known, judged.expected[path], actual))
        return found

    return rules


def _space(operator: str, shape: str, make: Any, of_rows: _Rows, wrap: Callable[[Any], Any] = lambda x: x) -> Space:
    return Space(
        operator, "huge", (Axis("shape", (shape,)),), make, _rules(of_rows), widen=False,
        oracle=_oracle(of_rows, wrap), sampled=True,
    )  # fmt: skip


register(
    _space("gemm", "70001x32768x16", _make_gemm, _gemm_rows, lambda out: Gemm(out, None, None)),
    _space("layernorm_fwd", "70001x32768", _make_norm, _norm_rows),
    _space("rmsnorm_fwd", "70001x32768", _make_norm, _norm_rows),
    _space("activation_fwd", "70001x32768", _make_rows, _activation_rows, lambda out: ActivationForward(out, None)),
    _space("softmax_fwd", "70001x32768", _make_rows, _softmax_rows),
    _space("rope_fwd", "70001x256x128", _make_rope, _rope_rows),
)
