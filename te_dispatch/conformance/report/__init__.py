# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a run found, as data (`record`), as JUnit XML (`junit`), as a page (`page`)."""
