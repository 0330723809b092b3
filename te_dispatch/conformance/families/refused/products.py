# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products that the contracts refuse."""

from __future__ import annotations

from collections.abc import Callable

import torch

from te_dispatch.conformance.families.refused.mistakes import Mistake, given, item, lengthened, longer, refused, short
from te_dispatch.conformance.space import Arguments, register
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import CurrentQuantizer


def _out(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arguments], torch.Tensor]:
    """`out` of a plain NT product, changed."""

    def out(right: Arguments) -> torch.Tensor:
        a, b = right["a"], right["b"]
        return change(torch.ones(a.shape[0], b.shape[0], dtype=a.dtype))

    return out


def _narrower(right: Arguments) -> Quantized:
    """b, a row-wise record with one scale, without its last columns."""
    b = right["b"]
    data = b.row_data[:, :-16].contiguous()
    return Quantized(
        data, None, b.row_scale_inv, None, b.encoding, b.scaling, b.scale_layout, tuple(data.shape), b.dtype, b.device
    )


_GEMM = {
    "accumulate_without_out": given(accumulate=True),
    "other_k": longer("b"),
    "long_bias": longer("bias", bias="same"),
    "short_bias": given({"bias": "same"}, bias=lambda right: right["bias"][:-1]),
    "wide_out": given(out=_out(lengthened)),
    "tall_out": given(out=_out(lambda x: lengthened(x, 0))),
    "out_of_shared_memory": given(out=_out(lambda x: x[:1].expand(x.shape))),
    "out_of_another_dtype": given(out=_out(lambda x: x.to(torch.float32)), out_dtype=torch.bfloat16),
    "out_and_out_quantizer": given(out=_out(lambda x: x), out_quantizer=CurrentQuantizer()),
    "dgelu_without_aux": given(epilogue="dgelu"),
    "gelu_with_aux": given(epilogue="gelu", aux=_out(lambda x: x)),
    "aux_without_epilogue": given(aux=_out(lambda x: x)),
    "bgrad_with_aux": given(epilogue="bgrad_b", aux=_out(lambda x: x)),
    "aux_of_another_size": given(epilogue="dgelu", aux=_out(lengthened)),
    "aux_quantizer_without_gelu": given(aux_quantizer=CurrentQuantizer()),
    "unknown_layout": given(layout="TT"),
    "unknown_epilogue": given(epilogue="tanh"),
    "result_of_integers": given(out_dtype=torch.int32),
}
_RECORDS = {
    "accumulate_without_out": given(accumulate=True),
    "other_k": given(b=_narrower),
    "long_bias": longer("bias", bias="same"),
    "wide_out": given(out=_out(lengthened)),
    "out_and_out_quantizer": given(out=_out(lambda x: x), out_quantizer=CurrentQuantizer()),
}
_GROUPED = {
    "accumulate_without_out": given(accumulate=True),
    "one_b_less": short("b"),
    "other_k": item("b", lengthened),
    "one_bias_less": Mistake(lambda right: {"bias": right["bias"][:-1]}, {"bias": "yes"}),
    "one_out_less": Mistake(lambda right: {"out": right["out"][:-1]}, {"out": "given"}),
    "splits_beyond_the_rows": Mistake(lambda right: {"splits": [n + 1 for n in right["splits"]]}, {"splits": "host"}),
    "one_split_less": Mistake(lambda right: {"splits": right["splits"][:-1]}, {"splits": "host"}),
}


register(
    refused("gemm", "plain", _GEMM),
    refused("gemm", "quantized", _RECORDS, "refused_quantized"),
    refused("grouped_gemm", "plain", _GROUPED),
)
