# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Groups of ranks: arguments of parallelism, weights that ranks divide, collectives, random states by name.

Start with `arguments`, which the modules use; `tensor_parallel` has what those do that divide their weight.
`collectives` and `rng_tracker` are for users. May import
`te_dispatch.core`, and of `te_dispatch.pytorch` `tensor`.
"""
