# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer Engine's interface, served by te_dispatch.

A module and not a package: beside an installed Transformer Engine, which is a package, it is never found.
"""

from te_dispatch.compat.alias import furnish, serve
from te_dispatch.compat.face import VERSION

__version__ = VERSION
__path__: list[str] = []

furnish(globals())
serve()
