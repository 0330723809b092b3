# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What every operator's arguments must be, once for all implementations.

`check_<family>.<operator>(...)` takes the arguments that need a look and raises TypeError or ValueError, naming the
argument, what came and what was expected. Implementations call these first, before they write anything. They never
synchronize with a device, and cache which calls passed (`check_cache`), so that the calls of a second step cost little.

Start with `gemm`, one family's checks; `values`, `rows` and `guards` are what they are made of. May import what
`te_dispatch.ops` may, and torch: nothing that declares operators imports this package.
"""
