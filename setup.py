"""The two C extensions: frame hook and guards, and the native host. CPython headers only, never torch's."""

from setuptools import Extension, setup

FLAGS = ["-O2", "-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]

setup(
    ext_modules=[
        Extension(
            "torchsmith.capture._frame",
            sources=["csrc/frame/module.c"],
            depends=["csrc/frame"],
            include_dirs=["csrc"],
            extra_compile_args=FLAGS,
        ),
        Extension(
            "torchsmith.runtime._native",
            sources=["csrc/native/module.c"],
            depends=["csrc/native", "csrc/torchsmith.h"],
            include_dirs=["csrc"],
            extra_compile_args=FLAGS,
        ),
    ]
)
