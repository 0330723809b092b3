# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What quantized numbers are, without arithmetic: how bytes read as numbers (`encodings`), the record of a quantized
tensor (`quantized`), descriptions of casts (`quantizers`), and the constants of NVFP4's transform (`hadamard`).

Start with `quantized`; ``docs/numerics.md`` has the formulas. May import: the standard library; PyTorch in functions,
and for annotations. No other room.
"""
