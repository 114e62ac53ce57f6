"""Every CUDA kernel compiles for the architectures of a wheel without spilling a register; needs nvcc, no GPU.

And so does the driver that `make sanitize` watches.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

INCLUDE = Path(__file__).parents[1] / "csrc"
SOURCES = sorted(INCLUDE.glob("**/*.cu"))
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("architecture", ["90a", "80"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_spills(source, architecture, tmp_path):
    command = [
        "nvcc", "-std=c++17", "-O3", "-DMF_BUILD_CUDA=1", f"-I{INCLUDE}", "-Xptxas", "-v", "-cubin",
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}", str(source), "-o", str(tmp_path / "out.cubin"),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    kernels = SPILL.findall(result.stderr)
    assert kernels, "no kernel was reported"
    assert all(int(stores) == 0 and int(loads) == 0 for _, stores, loads in kernels), result.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_sanitizers_driver_compiles(tmp_path):
    source = INCLUDE / "tests" / "gpu" / "check_kernels.cpp"
    options = ["-std=c++17", "-DMF_BUILD_CUDA=1", f"-I{INCLUDE}", "-c", "-o", str(tmp_path / "out.o")]
    command = ["nvcc", *options, str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
