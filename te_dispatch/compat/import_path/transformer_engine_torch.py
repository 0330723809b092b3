# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The numbers of Transformer Engine's native module that something here takes. Its functions raise with their names.

Beside an installed one, a compiled module, this file is not found, and beside an installed Transformer Engine, which
loads its own from another folder, it is refused.
"""

from te_dispatch.compat.alias import found, furnish

_there = found()
if _there is None or not _there[1]:
    raise ModuleNotFoundError(
        f"transformer_engine_torch: te_dispatch's is for its own transformer_engine, which is not what is imported: "
        f"{_there and _there[0]}",
        name=__name__,
    )
furnish(globals())
