# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Standing in for Transformer Engine under its own name.

`as_transformer_engine` in `alias` puts the folder ``import_path`` on `sys.path`. It holds a module `transformer_engine`
and the metadata of a distribution of that name, which is also all that the distribution in compat/transformer_engine
installs. `face` is the table of the modules and names that are offered; `face_functions` is a part of it, and `instead`
says what to use in the place of names that are not. `nvte_plugin` is something else: operators inside an installed
Transformer Engine.

Start with `face`. These four may import the standard library alone: what a name stands for is imported when it
is asked for. The adapters of `nvte_plugin` may import torch, `te_dispatch.ops` and what that may. Nothing in
`te_dispatch` but the command imports this package.
"""
