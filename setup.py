"""The two C extensions: frame hook and guards, and the native host. CPython headers only, never torch's."""

import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FLAGS = ["-O2", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]


class BuildExtensions(build_ext):
    """build_ext that says what is missing before the compiler says it less clearly."""

    def build_extensions(self) -> None:
        if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
            version = sysconfig.get_python_version()
            raise SystemExit(f"torchsmith needs the C headers of Python {version}: apt-get install python{version}-dev")
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildExtensions},
    ext_modules=[
        Extension(
            "torchsmith.capture._frame",
            sources=sorted(glob("csrc/frame/*.c")),
            depends=sorted(glob("csrc/frame/*.h")),
            include_dirs=["csrc"],
            extra_compile_args=FLAGS,
        ),
        Extension(
            "torchsmith.runtime._native",
            sources=sorted(glob("csrc/native/*.c")),
            depends=["csrc/native/native.h", "csrc/torchsmith.h"],
            include_dirs=["csrc"],
            extra_compile_args=FLAGS,
        ),
    ]
)
