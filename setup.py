"""Builds manus_fast._C with CMake and ninja; everything else is declared in pyproject.toml.

Environment: MF_CUDA=AUTO|ON|OFF, MF_CUDA_ARCHS (CMake's list), MF_MARCH (value of -march).
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import setuptools
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

if int(setuptools.__version__.split(".")[0]) < 77:  # which refuses pyproject.toml in many lines
    sys.exit(
        f"setuptools: expected 77 or newer, got {setuptools.__version__}: "
        "install it, or build without --no-build-isolation"
    )

ROOT = Path(__file__).resolve().parent


def _cmake() -> str:
    """The cmake of the Python package where there is one, which need not be on the PATH; else the system's."""
    try:
        import cmake
    except ImportError:
        return "cmake"
    return str(Path(cmake.CMAKE_BIN_DIR) / "cmake")


def _ninja() -> str:
    """The ninja that the Python package says it brought, wherever that is installed; else the one on the PATH.

    `ninja.BIN_DIR` knows only the scripts folders of this interpreter: it is empty in an environment that sees
    another's packages, and in pip's isolated builds."""
    try:
        files = metadata.files("ninja") or []
    except metadata.PackageNotFoundError:
        files = []
    brought = [Path(file.locate()).resolve() for file in files if file.name in ("ninja", "ninja.exe")]
    found = next((str(path) for path in brought if path.is_file()), None) or shutil.which("ninja")
    if found is None:
        raise FileNotFoundError("ninja: expected the package ninja or a ninja on the PATH, found neither")
    return found


class CMakeBuild(build_ext):
    """Runs CMake in build/cmake-<abi>-<cuda mode>, a fixed folder, so that a second build is incremental."""

    def build_extension(self, ext):
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        cuda = os.environ.get("MF_CUDA", "AUTO")
        build = ROOT / "build" / f"cmake-{sysconfig.get_config_var('SOABI')}-{cuda.lower()}"
        build.mkdir(parents=True, exist_ok=True)
        # An isolated pip build deletes its ninja and pybind11 afterwards: always name today's, never the cached ones.
        cmake = _cmake()
        configure = [
            cmake, "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={_ninja()}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DMF_CUDA={cuda}",
        ]  # fmt: skip
        for name in ("MF_CUDA_ARCHS", "MF_MARCH"):
            if name in os.environ:
                configure.append(f"-D{name}={os.environ[name]}")
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build), "--target", "_C"], check=True)
        subprocess.run([cmake, "--install", str(build), "--prefix", str(target)], check=True)


# configs/ and benchmarks/ stand at the top of the checkout and travel inside the package.
shipped = ["manus_fast.configs", "manus_fast.benchmarks"]
setup(
    ext_modules=[Extension("manus_fast._C", [])],
    cmdclass={"build_ext": CMakeBuild},
    packages=[*find_packages(include=["manus_fast", "manus_fast.*"]), *shipped],
    package_dir={"manus_fast.configs": "configs", "manus_fast.benchmarks": "benchmarks"},
    package_data={"manus_fast.configs": ["*.yaml"]},
)
