# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the memory of an operator's tensors may look like: part of its contract, per parameter.

The caller may pass any tensor that the form allows. An implementation reads it right where it lies, or copies it; a
forward that does neither declines, or raises a `ValueError` that names the argument, before it writes anything. A
backward may not, because the caller cannot choose again.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping

ANY, ROWS, WRITTEN, SAVED = "any", "rows", "written", "saved"

#: Form -> what it allows. Every form allows a tensor that starts at any element of its storage: nothing is aligned to
#: more than its own element.
FORMS: Mapping[str, str] = {
    ANY: "any strides: gaps between rows, dimensions in another order, 0 where it is expanded",
    ROWS: "the last dimension contiguous, the others with any strides",
    WRITTEN: "any strides with which no two elements share memory; what lies between its elements stays as it is",
    SAVED: "what the forward returned, as it returned it",
}
_TENSORS = ("Tensor", "Operand", "Quantized")


def forms_of(
    operator: str, signature: inspect.Signature, mutates: Collection[str], declared: Mapping[str, str]
) -> Mapping[str, str]:
    """The form of every parameter that holds tensors: as declared, else ``written`` where the operator writes it, else
    ``any``.

    Raises:
        ValueError: a parameter that is none, or an unknown form.
    """
    for name, form in declared.items():
        if name not in signature.parameters or form not in FORMS:
            raise ValueError(f"{operator}: got memory {name}={form!r}, expected a parameter and one of {list(FORMS)}")
    found = {}
    for name, parameter in signature.parameters.items():
        if name in declared:
            found[name] = declared[name]
        elif str(parameter.annotation).startswith("Saved"):
            found[name] = SAVED
        elif any(kind in str(parameter.annotation) for kind in _TENSORS):
            found[name] = WRITTEN if name in mutates else ANY
    return found
