# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls that the contracts refuse: operands that do not fit together, options without what they need.

Each is a plain call of another space with one mistake in it, which an implementation has to name in a `ValueError`
before it writes anything. Mistakes that only the contents of tensors show are made on the host alone.

Start with `mistakes`, what the others are made of. May import what `te_dispatch.conformance.families` may.
"""

from te_dispatch.conformance.families.refused import attention, casts, products, rows, training  # noqa: F401
