# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operator calls that between them launch every kernel in every form: one module per family, each with `calls`."""
