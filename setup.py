"""The two C extensions: frame hook and guards, and the native host. CPython headers only, never torch's."""

import shutil
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

FLAGS = ["-O2", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]


class BuildExtensions(build_ext):
    """build_ext that says what is missing before the compiler says it less clearly."""

    def build_extensions(self) -> None:
        if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
            version = sysconfig.get_python_version()
            raise SystemExit(f"torchsmith needs the C headers of Python {version}: apt-get install python{version}-dev")
        super().build_extensions()


class BuildPackage(build_py):
    """build_py that takes the C sources along: models are linked against them on the user's machine."""

    def run(self) -> None:
        super().run()
        kinds = {".c", ".h", ".hpp", ".cmake", ".pc"}
        for path in (p for p in Path("csrc").rglob("*.*") if p.suffix in kinds and p.parts[1] != "frame"):
            target = Path(self.build_lib) / "torchsmith" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


setup(
    cmdclass={"build_ext": BuildExtensions, "build_py": BuildPackage},
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
            depends=["csrc/torchsmith.h", *sorted(glob("csrc/native/*.h")), *sorted(glob("csrc/include/torchsmith/*.h"))],
            include_dirs=["csrc"],
            extra_compile_args=FLAGS,
        ),
    ]
)
