# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a run found: as data (`record`), JUnit XML (`junit`), tables in Markdown (`markdown`) and a page (`page`).

Start with `record`. May import what `te_dispatch.conformance` may; makes no call of an operator.
"""
