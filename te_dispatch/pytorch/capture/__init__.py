# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Capture and replay of modules' calls: what the modules' autograd Functions compute is written once, plainly, and a
call with a signature that was captured before runs as generated code.

Start with `functions`:

    signatures  a module's cache: input signatures, and the options with the program for each
    functions   `replayed`, the decorator of an autograd Function; `Replayable`, the base of its options
    recorder    records a call: operators, functions marked as a `step`, PyTorch's functions
    program     code generated from that, for the forward and for each kind of backward
    tape        a forward that calls several Functions, as a list of these with their gradients
    composed    calls of a module that is made of others, recorded and replayed as one Function
    statistics  `te_dispatch.pytorch.capture_stats`

A module makes its Function `replayed` and asks for a capture (`CapturedCalls.capture`); one that is made of others
makes its forward `composed`, and classes that may be parts of it are `composable`. Nothing else in them knows of this
room. May import what `te_dispatch.pytorch` may, and of its rooms `autograd` and `fp8`.
"""
