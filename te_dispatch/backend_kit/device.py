# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The current device and stream, as native launches take them.

`current_device()` is the index of the current CUDA device, `raw_stream(index)` the address of PyTorch's current stream
there, `is_capturing()` whether the current stream is being captured into a graph. Each is PyTorch's native function
where this release has it, at a tenth of the documented one's time.

`dispatch_modes()` is how many modes of ``__torch_dispatch__`` are entered: where there is one, work must go through
PyTorch's operators. `dlpack_exchange` is DLPack's table of exchange functions, for native code that reads tensors; None
before PyTorch 2.10.
"""

from __future__ import annotations

from te_dispatch.torch_private import current_device as current_device
from te_dispatch.torch_private import dispatch_modes as dispatch_modes
from te_dispatch.torch_private import dlpack_exchange as dlpack_exchange
from te_dispatch.torch_private import is_capturing as is_capturing
from te_dispatch.torch_private import raw_stream as raw_stream
