"""Building: what a wheel carries, installs that repeat, and what a machine without nvcc is told. (The slow ones build.)

Builds run in a copy of the tracked files, so that the checkout's own build folder is left alone; the environments they
go into see this one's packages, so that nothing but the project itself is installed.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command, env=None, cwd=None):
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, cwd=cwd,
        env={**os.environ, "MF_CUDA": "OFF", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(env or {})},
    )  # fmt: skip


def succeed(*command, **more):
    done = run(*command, **more)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the source files as git would hand them out, whatever has been built in this checkout."""
    target = tmp_path_factory.mktemp("source") / "checkout"
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "*.so", "__pycache__", "*.egg-info", ".*_cache", "runs", ".hypothesis"
    )
    return Path(shutil.copytree(ROOT, target, ignore=ignored))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A throwaway environment that sees this one's packages."""
    folder = tmp_path_factory.mktemp("venv")
    succeed(sys.executable, "-m", "venv", "--without-pip", folder)
    site = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    own = next((folder / "lib").glob("python*/site-packages"))
    # A plain .pth line adds the folder itself, not what its own .pth files name (an editable manus_fast among them).
    (own / "shared.pth").write_text(f"{site}\n")
    return folder / "bin" / "python"


def facts(python, tmp_path):
    """Where the installed package lies and what it can do, asked from outside the checkout."""
    code = (
        "import manus_fast, manus_fast._C as c; from manus_fast.commands import common\n"
        "print(manus_fast.__file__); print(c.build['cuda']); print(common.find_config(None, 'ppo_household'))\n"
        "print(common.shipped('benchmarks') / 'harness.py')"
    )
    package, cuda, config, harness = succeed(python, "-c", code, cwd=tmp_path).split("\n")[:4]
    assert Path(config).is_file() and Path(harness).is_file()
    assert succeed(Path(python).parent / "manus-fast", "--version", cwd=tmp_path).strip()
    return Path(package), cuda == "True"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_install_again_and_again_from_one_checkout(checkout, environment, tmp_path):
    """No build may stumble over what an earlier one left behind, such as the name of a deleted isolated ninja.

    Isolated after isolated, not isolated after isolated, and the other way round, in both modes. Each build in
    another environment than the last compiles the bindings anew, half a minute of one core: hence no more of them."""
    plain, editable, as_it_is = ["--force-reinstall", checkout], ["-e", checkout], ["--no-build-isolation"]
    for options, shown in (
        (plain, environment.parent.parent),
        (editable, None),
        ([*as_it_is, *editable], checkout),
        (plain, environment.parent.parent),
    ):
        succeed(environment, "-m", "pip", "install", "-q", "--no-deps", *options)
        if shown is not None:
            package, cuda = facts(environment, tmp_path)
            assert shown in package.parents and not cuda
    succeed(environment, "-m", "pip", "uninstall", "-q", "-y", "manus-fast")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_wheel_carries(checkout, environment, tmp_path):
    """configs/ and benchmarks/ travel inside the package; nothing else of the checkout does."""
    succeed(
        environment, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, checkout
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"manus_fast"}
    for wanted in ("_C", "configs/ppo_household.yaml", "configs/sft_household.yaml", "benchmarks/harness.py"):
        assert any(name.startswith(f"manus_fast/{wanted}") for name in names), wanted
    assert not any(name.endswith((".cpp", ".cu", ".json")) and ".dist-info/" not in name for name in names)
    assert wheel.stat().st_size < 3_000_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_source_archive_holds_what_a_build_needs(checkout, tmp_path):
    succeed(
        sys.executable, "-c",
        f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})", cwd=checkout,
    )  # fmt: skip
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {"/".join(name.split("/")[1:]) for name in tar.getnames()}
    assert {"CMakeLists.txt", "setup.py", "csrc/bindings.cpp", "csrc/common/parallel.h", "configs/ppo_household.yaml",
            "benchmarks/harness.py", "LICENSE"} <= names  # fmt: skip


def configure(tmp_path, *options, path="/usr/bin:/bin"):
    """Runs CMake's configure step alone, with a PATH on which there is no nvcc."""
    bare = {"PATH": path, "CUDACXX": "", "CUDA_PATH": "", "CUDA_HOME": ""}
    cmake = shutil.which("cmake")
    if cmake is None:
        cmake = pytest.importorskip("cmake").CMAKE_BIN_DIR + "/cmake"
    return run(cmake, "-S", ROOT, "-B", tmp_path / "b", "-DMF_BUILD_PYTHON=OFF", *options, env=bare)


@pytest.mark.skipif(Path("/usr/bin/nvcc").exists(), reason="nvcc is on the bare PATH")
def test_cuda_on_without_nvcc_is_one_clear_error(tmp_path):
    # CMake also looks in CUDA's usual place: a compiler that isn't there says that this machine has none.
    done = configure(tmp_path, "-DMF_CUDA=ON", "-DCMAKE_CUDA_COMPILER=NOTFOUND")
    assert done.returncode != 0
    assert "MF_CUDA=ON needs nvcc, and none was found" in done.stderr
    assert done.stderr.count("CMake Error") == 1


def test_unknown_cuda_mode(tmp_path):
    done = configure(tmp_path, "-DMF_CUDA=MAYBE")
    assert done.returncode != 0 and "MF_CUDA: expected AUTO, ON or OFF, got 'MAYBE'" in done.stderr


@pytest.mark.skipif(Path("/usr/bin/nvcc").exists(), reason="nvcc is on the bare PATH")
@pytest.mark.parametrize("mode", ["AUTO", "OFF"])
def test_without_nvcc_the_build_is_for_the_cpu(tmp_path, mode):
    done = configure(tmp_path, f"-DMF_CUDA={mode}", "-DCMAKE_CUDA_COMPILER=NOTFOUND")
    assert done.returncode == 0, done.stderr
    assert not any(
        name in (tmp_path / "b" / "CMakeCache.txt").read_text() for name in ("CUDAToolkit_NVCC_EXECUTABLE:",)
    )
