# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the benchmarks that compare rivals share: rows, rivals, clocks, goals, records."""
