# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The compiled kernels: C that knows nothing of PyTorch or Python."""

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python 3: no symbol of the interpreter is used."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "te_dispatch_acme._kernels",
            ["te_dispatch_acme/kernels.c"],
            # -ffp-contract=off: gcc fuses a product and a sum into one rounding by default, which changes results.
            extra_compile_args=["-O2", "-std=c11", "-Wall", "-ffp-contract=off"],
            libraries=["m"],
            py_limited_api=True,  # names the file _kernels.abi3.so, without a Python version
            optional=True,  # without a compiler the wheel is built all the same
        )
    ],
    cmdclass={"bdist_wheel": PlatformWheel},
)
