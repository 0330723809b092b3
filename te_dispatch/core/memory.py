# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the memory of an operator's tensors may look like: part of its contract, per parameter.

The caller may pass any tensor that the form allows. An implementation reads it right where it lies, or copies it; a
forward that does neither declines, or raises a `ValueError` that names the argument, before it writes anything. A
backward may not, because the caller cannot choose again.
"""

from __future__ import annotations

from collections.abc import Mapping

ANY, ROWS, WRITTEN, SAVED = "any", "rows", "written", "saved"

#: Form -> what it allows. Every form allows a tensor that starts at any element of its storage: nothing is aligned to
#: more than its own element.
FORMS: Mapping[str, str] = {
    ANY: "any strides: gaps between rows, dimensions in another order, 0 where it is expanded",
    ROWS: "the last dimension contiguous, the others with any strides",
    WRITTEN: "any strides with which no two elements share memory; what lies between its elements stays as it is",
    SAVED: "what the forward returned, as it returned it",
}
