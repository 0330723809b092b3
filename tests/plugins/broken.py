# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Plugins that are broken in one way each.

All of them declare the vendor ``cpu``, which makes them native to every device of the tests: under the default policy
each would come first if it were sound.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from .workshop import write_wheel

_HEAD = (
    "from te_dispatch.core.manifest import Implementation, Manifest\n"
    "from te_dispatch.core.requirements import Compare, MultipleOf, OneOf\n"
)


@dataclass(frozen=True)
class Plugin:
    """What a plugin's distribution holds.

    Attributes:
        name: of the backend.
        source: of the module that its entry point names, where it is not a manifest made of the other fields.
        implementation: arguments of its only `Implementation`.
        manifest: further arguments of its `Manifest`.
        api_version: of the manifest.
        code: of ``<name>_kernels``, the module that targets and probes are in.
        distribution: its name where it is not ``te-dispatch-<name>``.
    """

    name: str
    source: str = ""
    implementation: str = ""
    manifest: str = ""
    api_version: int = 1
    code: str = ""
    distribution: str = ""

    def wheel(self, folder: Path) -> Path:
        distribution = self.distribution or f"te-dispatch-{self.name}"
        module = distribution.removeprefix("te-dispatch-").replace("-", "_")
        implementations = f"(Implementation({self.implementation}),)" if self.implementation else "()"
        manifest = (
            f"{_HEAD}MANIFEST = Manifest(name={self.name!r}, api_version={self.api_version}, vendors=('cpu',), "
            f"implementations={implementations}, {self.manifest})\n"
        )
        modules = {f"{module}_manifest": self.source or manifest, f"{module}_kernels": dedent(self.code)}
        return write_wheel(folder, distribution, modules, {self.name: f"{module}_manifest:MANIFEST"})


_GEMM = "op='gemm@1', name='gemm', rank=1, target='{}_kernels:gemm'"

#: Not among the backends at all.
REFUSED = (
    Plugin("noimport", source="import a_driver_that_is_not_here\n"),
    Plugin("asserts", source="assert False, 'the driver is too old'\n"),
    Plugin("exits", source="raise SystemExit('no licence')\n"),
    Plugin("future", api_version=99, implementation=_GEMM.format("future")),
    Plugin("twin", distribution="te-dispatch-twin-a"),
    Plugin("twin", distribution="te-dispatch-twin-b"),
    Plugin("nomanifest", source="MANIFEST = 42\n"),
    Plugin("nocondition", implementation=_GEMM.format("nocondition") + ", requires=('sm_90 or newer',)"),
    Plugin("misclaims", implementation=_GEMM.format("misclaims") + ", claims={'fastest'}"),
    Plugin("oneclaim", implementation=_GEMM.format("oneclaim") + ", claims='deterministic'"),
    Plugin("skips", source="class Skipped(BaseException): pass\nraise Skipped('elsewhere')\n"),
    Plugin("listing", manifest="devices=[1]"),
    Plugin("numbered", manifest="archs={'cpu': {'cpu': 5}}"),
    Plugin("endless", implementation=_GEMM.format("endless") + ", requires=(Compare('k', '<=', float('inf')),)"),
    Plugin("boundless", implementation=_GEMM.format("boundless") + ", requires=(Compare('k', '>=', None),)"),
    Plugin("zeroth", implementation=_GEMM.format("zeroth") + ", requires=(MultipleOf('k', 0),)"),
    Plugin("ruler", source="import te_dispatch\nte_dispatch.set_policy('verify')\n"),
)

#: Backends with an implementation that cannot be used.
UNUSABLE = (
    Plugin("nextop", implementation="op='gemm@99', name='gemm', target='nextop_kernels:gemm'"),
    Plugin("newop", implementation="op='warp_drive@1', name='warp_drive', target='newop_kernels:engage'"),
    Plugin("oddfact", implementation=_GEMM.format("oddfact") + ", requires=(OneOf('a.colour', 'red'),)"),
    Plugin("oddword", implementation=_GEMM.format("oddword") + ", requires=(OneOf('device.vender', 'cpu'),)"),
    Plugin("longword", implementation=_GEMM.format("longword") + ", requires=(OneOf('a.dtype', 'float32'),)"),
    Plugin(
        "oddsign",
        implementation=_GEMM.format("oddsign"),
        code="""
        def gemm(a, b, *, layout, alpha=1.0, beta=0.0, out=None, accumulate=False, bias=None, epilogue=None, aux=None,
                 aux_quantizer=None, out_dtype=None, out_quantizer=None, split_accumulator=None):
            raise AssertionError("called in spite of its signature")
        """,
    ),
    Plugin("nokernel", implementation=_GEMM.format("nokernel"), code="import a_kernel_library_that_is_not_here\n"),
    Plugin("quits", implementation=_GEMM.format("quits"), code="raise SystemExit('no licence')\n"),
)

#: Backends whose probes fail.
PROBES = (
    Plugin(
        "badprobe",
        manifest="devices={'cpu': 'badprobe_kernels:probe'}",
        code="def probe(index): raise RuntimeError('the driver does not answer')\n",
    ),
    Plugin(
        "dictprobe",
        manifest="devices={'cpu': 'dictprobe_kernels:probe'}",
        code="def probe(index): return {'vendor': 'cpu'}\n",
    ),
    Plugin(
        "badcheck",
        implementation=_GEMM.format("badcheck"),
        manifest="unavailable='badcheck_kernels:unavailable'",
        code="def unavailable(): raise OSError('libbad.so: wrong ELF class')\n",
    ),
    # Of a device type that no call below is on: in a call's process nothing could contain what these do.
    Plugin(
        "killer",
        manifest="devices={'xpu': 'killer_kernels:probe'}, doctor='killer_kernels:doctor'",
        code="""
        import os
        def probe(index): os._exit(7)
        def doctor(): return [("driver", "ok", "still answers")]
        """,
    ),
    Plugin(
        "crasher",
        manifest="devices={'mps': 'crasher_kernels:probe'}",
        code="""
        import os, signal
        def probe(index): os.kill(os.getpid(), signal.SIGSEGV)
        """,
    ),
)

#: Sound, but written when softmax_fwd had no out_dtype yet.
OLDER = Plugin(
    "older",
    implementation="op='softmax_fwd@1', name='softmax_fwd', rank=1, target='older_kernels:softmax_fwd'",
    code="""
    import torch

    def softmax_fwd(x, mask=None, *, scale=1.0, causal=False):
        z = x.float() * scale
        if causal:
            z = z.masked_fill(torch.ones(z.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        if mask is not None:
            z = z.masked_fill(mask, float("-inf"))
        return torch.softmax(z, -1).to(x.dtype)
    """,
)
