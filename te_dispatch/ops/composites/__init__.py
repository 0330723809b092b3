# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operators expressed in simpler ones, a module per family. They take part in resolution as ``composite.<name>``."""
