# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch demo``: the same small GPT trained in BF16 and in FP8, side by side.

The library part (`options`, `data`, `model`, `train`, `counting`) has no console in it and can be used from scripts.

Start with `command`. May import what `te_dispatch.cli` may, and torch.
"""
