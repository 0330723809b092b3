# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Lists of tensors for a kernel: a table in device memory that launches fill by value, so that nothing is copied from
the host and a captured graph holds what it needs.

A table is int64 (entries, fields): addresses, then the number of elements, the first program that works on the entry,
and the dtypes' codes. Numbers travel with bit 62 set, because Triton tells integers of 32 and 64 bits apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.codes import narrow

COUNT: tl.constexpr = tl.constexpr(0)
FIRST: tl.constexpr = tl.constexpr(1)
CODES: tl.constexpr = tl.constexpr(2)
#: Fields beside addresses.
OTHERS: tl.constexpr = tl.constexpr(3)
FLOAT32: tl.constexpr = tl.constexpr(0)
BFLOAT16: tl.constexpr = tl.constexpr(1)
FLOAT16: tl.constexpr = tl.constexpr(2)


@triton.jit
def write_words(table, words, LENGTH: tl.constexpr):
    """table[start + i * step] = words[1 + i] without bit 62, for i below count. words[0]: start, in 30 bits, step and
    count in 16 each."""
    where = words[0] & 0x3FFFFFFFFFFFFFFF
    start, step, count = where >> 32, (where >> 16) & 0xFFFF, where & 0xFFFF
    for i in tl.static_range(LENGTH):
        tl.store(table + start + i * step, words[1 + i] & 0x3FFFFFFFFFFFFFFF, mask=i < count)


@triton.jit
def entry_of(table, entries, LISTS: tl.constexpr, MOST: tl.constexpr):
    """Where in the table the entry begins that this program works on. MOST: a power of two, at least `entries`."""
    fields: tl.constexpr = LISTS + OTHERS
    e = tl.arange(0, MOST)
    first = tl.load(table + e * fields + (LISTS + FIRST), mask=e < entries, other=1 << 62)
    place = tl.sum((first <= tl.program_id(0)).to(tl.int32), axis=0) - 1
    return table + place * fields


@triton.jit
def tensor_at(entry, LIST: tl.constexpr, dtype: tl.constexpr):
    """The address of a list's tensor in an entry, as a pointer."""
    return tl.load(entry + LIST).to(tl.pointer_type(dtype))


@triton.jit
def read(base, i, count, WHOLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements i of a tensor, 0 from `count` on. WHOLE: all are below it, which lets loads be wide; ALIGNED: the tensor
    begins at a multiple of 16 bytes and i at one of 16 elements, which they need too."""
    # The hint stands beside the addition: one on a parameter is lost where the call is inlined.
    pointers = tl.multiple_of(base + i, 16) if ALIGNED else base + i
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=i < count, other=0.0)


@triton.jit
def write(base, i, value, count, WHOLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Stores elements i below `count`."""
    pointers = tl.multiple_of(base + i, 16) if ALIGNED else base + i
    if WHOLE:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=i < count)


@triton.jit
def read_coded(address, code, i, count, WHOLE: tl.constexpr, ALIGNED: tl.constexpr):
    """`read`, as fp32, of a tensor whose dtype is a code."""
    if code == FLOAT32:
        x = read(address.to(tl.pointer_type(tl.float32)), i, count, WHOLE, ALIGNED)
    elif code == BFLOAT16:
        x = read(address.to(tl.pointer_type(tl.bfloat16)), i, count, WHOLE, ALIGNED).to(tl.float32)
    else:
        x = read(address.to(tl.pointer_type(tl.float16)), i, count, WHOLE, ALIGNED).to(tl.float32)
    return x


@triton.jit
def write_coded(address, code, i, x, count, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, INTERPRETED: tl.constexpr):
    """`write` of fp32 values to a tensor whose dtype is a code."""
    if code == FLOAT32:
        write(address.to(tl.pointer_type(tl.float32)), i, x, count, WHOLE, ALIGNED)
    elif code == BFLOAT16:
        narrowed = narrow(x, tl.bfloat16, INTERPRETED)
        write(address.to(tl.pointer_type(tl.bfloat16)), i, narrowed, count, WHOLE, ALIGNED)
    else:
        write(address.to(tl.pointer_type(tl.float16)), i, x.to(tl.float16), count, WHOLE, ALIGNED)
