"""The two C extensions: frame hook and guards, and the native host. CPython headers only, never torch's.

The fixed part of model libraries is compiled too, so that the first one that is made does not wait for it.
"""

import os
import shutil
import sys
import sysconfig
import tempfile
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

    def run(self) -> None:
        super().run()
        in_place = self.inplace or getattr(self, "editable_mode", False)
        prebuild(Path("src" if in_place else self.build_lib) / "torchsmith" / "runtime" / "engine")


def prebuild(folder: Path) -> None:
    """Without it, the same objects are compiled and cached where they are needed first."""
    sys.path.insert(0, "src")
    before = os.environ.get("TORCHSMITH_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="torchsmith-setup-") as cache:
        os.environ["TORCHSMITH_CACHE_DIR"] = cache
        try:
            from torchsmith.codes import Unsupported
            from torchsmith.runtime.model_library import prebuild as compile_engine

            compile_engine(folder)
        except Unsupported as e:
            print(f"the engine of model libraries is not compiled now: {e}")
        finally:
            os.environ.pop("TORCHSMITH_CACHE_DIR")
            os.environ.update({} if before is None else {"TORCHSMITH_CACHE_DIR": before})
            sys.path.remove("src")


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
