# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What rooms above the runtime do for it, at moments that only the runtime sees.

The runtime imports none of these rooms. ``te_dispatch/__init__.py``, which every import of the project runs first, says
where each function is. It is imported when it is needed.
"""

from __future__ import annotations

#: Hook -> ``module:attribute``.
#:
#: ``traced_call(operator, args)`` makes a call on fake tensors while a graph is traced from them.
#: ``comparison(manager, operator, candidate, against, args)`` copies a call of shadow mode, to judge it afterwards.
#: ``declared`` lies in the module that declares every operator.
HOOKS: dict[str, str] = {}
