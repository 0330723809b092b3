# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Helpers of autograd Functions: a cheaper `apply`, and the policy scope of the forward in the backward.

Start with `scoped`. May import `te_dispatch.ops`, `te_dispatch.core`, and of `te_dispatch.pytorch` `tensor`.
"""
