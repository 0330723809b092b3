# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Compiling every kernel for chips that are not here, and reading the assembly.

`calls` makes operator calls at real sizes; they are recorded, not run, as each target's configurations would launch
them; `matrix` compiles what was recorded and reports what the assembly holds.
"""
