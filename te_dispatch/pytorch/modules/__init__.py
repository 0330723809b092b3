# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The layers: `Linear`, `LayerNormLinear`, `LayerNormMLP`, norms, `MultiheadAttention`, `TransformerLayer`, padding.

Start with `linear`. A GEMM module is a `GemmModule` (`gemm_module`: it has an `Fp8State` and a `CapturedCalls`) with an
autograd Function that reads from top to bottom and is made of steps: `gemm_steps` (quantize, products),
`linear_steps`, `norm_steps`. `parameters` makes and names parameters, `weight_grads` and `main_grads` say where their
gradients go. `capture` replays a Function's calls from outside. `constructor_views` and `classes` are what programs ask
about modules under Transformer Engine's names, and what holds when it is assigned (`te_dispatch.pytorch.assignment`).

May import every other room of `te_dispatch.pytorch` but `graphs` and `planning`.
"""
