# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Groups of ranks: arguments of parallelism on one rank, collectives, random states by name.

Start with `arguments`, which the modules use. `collectives` and `rng_tracker` are for users. May import
`te_dispatch.core`, and of `te_dispatch.pytorch` `tensor`.
"""
