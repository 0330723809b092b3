# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What follows a product, on one tile of fp32 values: bias, gelu or its derivative, accumulation, cast and store."""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels import tile
from te_dispatch_triton.kernels.codes import decode, narrow


@triton.jit
def logistic(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gelu_argument(z):
    """2 t of the tanh form: gelu(z) = 0.5 z (1 + tanh t) = z logistic(2 t), t = sqrt(2 / pi) (z + 0.044715 z^3)."""
    return 1.5957691216057308 * (z + 0.044715 * (z * z * z))


@triton.jit
def gelu(z):
    return z * logistic(gelu_argument(z))


@triton.jit
def gelu_derivative(z):
    """d gelu / dz = s + z s (1 - s) 2 t', s = logistic(2 t)."""
    s = logistic(gelu_argument(z))
    bell = s * (1.0 - s)
    # The slope may be infinite where the bell is 0.
    slope = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * (z * z))
    return tl.where(bell == 0.0, s, s + z * bell * slope)


@triton.jit
def finish(
    z, out, bias, aux, aux_scale, aux_scale_inv, aux_amax, out_scale, out_scale_inv, out_amax, sums, m, n, first_m,
    first_n, row, first, EPILOGUE: tl.constexpr, ACCUMULATE: tl.constexpr, OUT_CODE: tl.constexpr,
    OUT_COMMON: tl.constexpr, OUT_HARD: tl.constexpr, AUX_CODE: tl.constexpr, AUX_COMMON: tl.constexpr,
    AUX_HARD: tl.constexpr, INTERPRETED: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Bias, epilogue, accumulation, one rounding or cast, in that order, and the store.

    z: values of the tile of the output (m, n) that begins at (first_m, first_n), in tile row `row`.
    first: whether this tile writes what is written once.
    """
    rows, columns = tile.span(first_m, z.shape[0]), tile.span(first_n, z.shape[1])
    places, mask = rows[:, None] * n + columns[None, :], tile.inside(rows, columns, m, n)
    if bias is not None:
        z += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == "gelu":
        if AUX_CODE == "none":
            tl.store(aux + places, narrow(z, aux.dtype.element_ty, INTERPRETED), mask=mask)
        else:
            cast(z, aux, aux_scale, aux_scale_inv, aux_amax, places, mask, first, AUX_CODE, AUX_COMMON, AUX_HARD)
        z = gelu(z)
    if EPILOGUE == "dgelu":
        held = tl.load(aux + places, mask=mask, other=0.0)
        held = held.to(tl.float32) if AUX_CODE == "none" else decode(held, AUX_CODE) * tl.load(aux_scale)
        z = z * gelu_derivative(held)
        tile.put_sums(tl.where(mask, z, 0.0), sums, row, columns, n)
    if ACCUMULATE:
        z += tl.load(out + places, mask=mask, other=0.0).to(tl.float32)
    if OUT_CODE != "none":
        cast(z, out, out_scale, out_scale_inv, out_amax, places, mask, first, OUT_CODE, OUT_COMMON, OUT_HARD)
    elif STORE:
        out.store([first_m, first_n], z.to(out.dtype))
    else:
        tl.store(out + places, narrow(z, out.dtype.element_ty, INTERPRETED), mask=mask)


@triton.jit
def cast(
    z, target, scale, scale_inv, amax, places, mask, first,
    CODE: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """A delayed cast: codes, the scale's inverse, and the amax that the quantizer accumulates."""
    factor = tl.load(scale)
    tile.put_inverse(scale_inv, factor, first)
    if amax is not None:
        tile.record_amax(amax, tile.amax_of(tl.where(mask, z, 0.0)))
    tl.store(target + places, tile.scaled_codes(z, factor, CODE, COMMON, HARD), mask=mask)
