# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Recipes: how a model is trained in 8 or 4 bits, under Transformer Engine's names (``transformer_engine.common``).

Start with `recipe`. `recipe_base` has the base of recipes, `recipe_parameters` what they are made of,
`recipe_arguments` which values and keywords their constructors take, `recipe_defaults` the defaults that environment
variables set, `recipe_values` how recipes compare and what assigning to one does. May import: the standard library, and
`te_dispatch.core.policy.known` for the nearest word.
"""
