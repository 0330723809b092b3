# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Modules as CUDA graphs: what `te_dispatch.pytorch.make_graphed_callables` is made of.

Start with `make_graphed_callables`, and read on in this order:

    settings    its arguments
    schedule    which call is captured when, forward and backward
    signature   the tensors of a call: the samples are checked, and become the buffers that graphs read
    callables   what a callable must be like
    session     warm-up, then capture
    recording   states of delayed scaling, which neither may change; what a replay does for them instead of the modules
    graphs      the CUDA graphs themselves, and random states
    captured    one captured call: the autograd Function that replays it
    graphed     what the caller gets

`outside` is for programs that capture modules by themselves.

May import every room of `te_dispatch.pytorch`; they know of it only `fp8.autocast.thread.recording`.
"""
