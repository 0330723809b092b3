# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`te_dispatch.pytorch.plan`: every decision of a module's forward and backward, from shapes alone.

Start with `module_plan`; `fake_modules` makes the copies without data that it runs. May import `te_dispatch.core`,
`te_dispatch.ops`, and of `te_dispatch.pytorch` `fp8`.
"""
