# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The native code: the device, built against PyTorch, and the kernels, which know nothing of PyTorch or Python."""

from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    ext_modules=[
        CppExtension("npu_device._device", ["npu_device/device.cpp"], extra_compile_args=["-O1"]),
        # Optional: without a compiler the wheel is built all the same, and `unavailable` says what is missing.
        # -ffp-contract=off: no fused multiply-add unless the source says so, whatever the compiler's default.
        Extension(
            "te_dispatch_npu._kernels",
            ["te_dispatch_npu/kernels.c"],
            extra_compile_args=["-O2", "-std=c11", "-ffp-contract=off"],
            libraries=["m"],
            optional=True,
        ),
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
)
