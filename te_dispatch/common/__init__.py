# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Recipes: how a model is trained in 8 or 4 bits, under Transformer Engine's names (``transformer_engine.common``).

Start with `recipe`. `recipe_parameters` has what recipes are made of, `recipe_values` how they compare and what
assigning to one does. May import: the standard library, and `te_dispatch.core.policy.known` for the nearest word.
"""
