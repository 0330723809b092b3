# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The dispatch runtime: from the call of an operator to an implementation that serves it.

A call goes through these modules, in this order:

1. `operator`: the operator's signature, and the facts of a call that its arguments give (`facts`, `arguments`).
2. `manager` holds the registry (`discovery`, `manifest`, `snapshot`) and the scope in force (`scopes`, `bindings`);
   `trampolines` and `codegen` make the functions that ``te_dispatch.ops`` exports.
3. `dispatcher` looks the call's facts up (`entries`, `tables`). The first call of its kind is resolved.
4. `resolve` decides, as one pure function of operator, call, device (`devices`), policy (`policy`) and registry. It
   returns a `decision` with every candidate and the reason for its place (`eligibility`, `requirements`,
   `companions`, `composition`).
5. `bind` imports the winner and compares its signature with the operator's; `functions` keeps it.
6. The implementation runs. `errors.Declined`, raised before anything is written, hands the call to the next candidate.

Start with `resolve`. Beside that path: `plan` freezes decisions, `planning` decides a module's calls without making
them (`module_plan`), `shadow` compares backends in a running job, `emulation` lets the CPU count as another chip,
`tuning_cache` keeps what backends measured, `autograd` and `memory` are part of what an implementation must obey.

May import: the standard library; stevedore, PyYAML and msgspec at the first resolution; torch and
`te_dispatch.torch_private` in functions only. No other room: `te_dispatch.ops` declares the operators, describes their
operands (`operands`) and adds them to the process's manager; what rooms above do for the runtime is named in `hooks`.
"""
