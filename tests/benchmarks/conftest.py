# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The benchmarks are programs, not a package: their folder goes onto the path, as Python does when it runs them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
