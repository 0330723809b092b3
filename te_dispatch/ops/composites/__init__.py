# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operators expressed in simpler ones, a module per family. They take part in resolution as ``composite.<name>``.

Start with `activation`, the shortest. `te_dispatch.core.composition` says how pieces are resolved. May import what
`te_dispatch.ops` may; a build function imports torch, and calls the pieces that it is given.
"""
