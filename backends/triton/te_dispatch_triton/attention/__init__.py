# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention by the flash algorithm. Contract: `te_dispatch.ops.attention`.

| module | what |
|---|---|
| `plans` | what launches of calls with one `AttentionSpec` share |
| `operators` | the operators |
"""
