# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantized training: the recipe in force, what it means for one module, and the state of delayed scaling.

Start with `autocast`, then `casts`. The modules by what they are about:

    the region       `autocast`; `global_state` (`FP8GlobalStateManager`); `model_init`; `support`, whether a recipe can
                     be used
    a module's plan  `casts`: quantizers, usages and accumulation of one module; `recipe_casts` and `custom_casts` say
                     what a recipe asks for; `quantizer_role` for which tensors; `quantizer_factories` are
                     factories that cast as built-in recipes do, `quantizer_request` is what a factory may not return,
                     `recipe_state` is a recipe as quantizers for programs outside;
                     `quantized_io` casts at a module's edges
    delayed scaling  `delayed_scales`: histories and scales of one module; `scale_group` and `scale_update` update those
                     of many at once; `amax_reduction` over ranks
    a module's part  `module_state`: `Fp8State`, all that quantized calls of one module need and leave, and how a call
                     begins; it holds `module_scales` (delayed scaling) and `weight_cache`. `extra_state` is the format
                     in checkpoints, `empty_entry` what one of a module without states is, `saved_module` and
                     `asking_module` are what modules have of it, `state_views` shows it under Transformer Engine's
                     names
    recomputation    `regions`: what a checkpointed forward leaves for its recomputation

May import `te_dispatch.common`, `te_dispatch.ops`, `te_dispatch.core`, `te_dispatch.numerics`, and of
`te_dispatch.pytorch` `compile` and `tensor`.
"""
