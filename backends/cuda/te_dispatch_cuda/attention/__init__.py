# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention on NVIDIA GPUs: cuDNN, and FlashAttention where it is installed. Contract: `te_dispatch.ops.attention`.

| module | what |
|---|---|
| `frontend` | NVIDIA's Python package over the process's own cuDNN; handles |
| `geometry` | operands as cuDNN takes them: dimensions, strides, sizes of the score matrix |
| `graphs` | building graphs, and running them |
| `rows` | sequences of a batch, and rows that cuDNN leaves as they were |
| `assemble` | a graph and all that a call needs besides, out of an `AttentionSpec` |
| `calls` | calls that were made before |
| `run` | running one |
| `cudnn` | the operators on cuDNN |
| `flash`, `flash_packages` | the operators on the FlashAttention packages 2, 3 and 4 |
"""
