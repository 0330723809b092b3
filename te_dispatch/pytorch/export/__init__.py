# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Export to ONNX, under Transformer Engine's names.

`mode` says whether a graph that is made now is for ONNX and puts the policy of such graphs in force, `lowering` records
quantized operands in it, `operators` holds the two operators that it adds to PyTorch's and their translation.

Start with `mode`. May import `te_dispatch.ops`, `te_dispatch.core` and `te_dispatch.numerics`, and no module;
`te_dispatch.pytorch.compile.proxies` asks it while a graph is made.
"""

import te_dispatch.pytorch.export.lowering  # noqa: F401  # now, since constants made while a graph is are fake
from te_dispatch.pytorch.export.mode import is_in_onnx_export_mode, onnx_export
from te_dispatch.pytorch.export.operators import te_translation_table

__all__ = ["is_in_onnx_export_mode", "onnx_export", "te_translation_table"]
