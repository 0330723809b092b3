# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention by the flash algorithm. Contract: `te_dispatch.ops.attention`.

| module | what |
|---|---|
| `setting` | what of a call the launches depend on, and the launches' constants and numbers |
| `operators` | the operators |
"""
