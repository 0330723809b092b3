# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`DotProductAttention` (`dot_product`), rotary embeddings (`rotary`), and which kernel would attend (`backends`).

A call goes through `inputs` (query, key and value, checked), `masks` (masks and windows of the module interface to
those of the operators), `bounds` (where sequences begin and end), `lowering` (biases, explicit masks) and `function`
(the autograd Function). `signature` says which calls may be captured.

Under Transformer Engine's names: `full_masks`, `packing` and `memory_layouts` are functions for programs that attend by
themselves, `views` attributes of its attention modules and layers.

Start with `dot_product`. May import `te_dispatch.ops`, `te_dispatch.core`, and of `te_dispatch.pytorch` every room but
`modules` and `graphs`.
"""
