# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The scope in force, where torch.compile can read it: it cannot read a context variable."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_dispatch.core.bindings import Bindings


class Mirror(threading.local):
    """The bindings of the scope that this thread is in, None outside any.

    Attributes:
        mark: of whoever entered it last.
        shared: a scope was entered in an event loop of this thread, whose tasks the mirror cannot tell apart.
    """

    def __init__(self) -> None:
        self.bindings: Bindings | None = None
        self.mark: object = None
        self.shared = False

    def show(self, bindings: Bindings, mark: object) -> None:
        """Show the scope that is entered now. Who leaves it puts back what was shown before."""
        self.bindings, self.mark = bindings, mark
        if _in_event_loop():
            self.shared = True


def _in_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")
    running = getattr(asyncio, "_get_running_loop", None)
    return running is not None and running() is not None
