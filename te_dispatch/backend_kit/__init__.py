# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the host side of a backend needs whatever its kernels are written in: the current device and stream, contiguous
operands and outputs, launches that are planned once, bounded caches, tuning, PyTorch's settings of matrix products.

A plugin may use it or not; no operator asks for it. Start with `memory`. May import: torch, `te_dispatch.core`,
`te_dispatch.ops`, `te_dispatch.numerics` and `te_dispatch.torch_private`. Nothing outside of backends imports it.

| module | what for |
|---|---|
| `te_dispatch.backend_kit.algorithms` | tuned algorithms of a library, in a file |
| `te_dispatch.backend_kit.attention` | attention's parameters as one spec, memory for its gradients |
| `te_dispatch.backend_kit.call_plans` | launches that are planned once for each signature of a call |
| `te_dispatch.backend_kit.caches` | bounded caches of functions, and a dict with a bound |
| `te_dispatch.backend_kit.flash` | attention with FlashAttention's interface |
| `te_dispatch.backend_kit.gemm` | what follows a product as one epilogue |
| `te_dispatch.backend_kit.device` | the current device, its stream, whether it is captured |
| `te_dispatch.backend_kit.libraries` | a vendor's libraries, opened at run time |
| `te_dispatch.backend_kit.memory` | contiguous operands, outputs and strides |
| `te_dispatch.backend_kit.tuning` | timing the candidates of a call for ``te-dispatch tune`` |
| `te_dispatch.backend_kit.tuning_operands` | random operands of a product that is tuned |
| `te_dispatch.backend_kit.products` | PyTorch's settings and functions of matrix products |
"""
