"""The CUDA kernels of gae and ppo_loss on a CPU: csrc/tests/gpu/check_kernels.cpp over csrc/tests/emulated.

The kernels' own sources are compiled by the host's compiler, each thread of a block as a std::thread; results are
compared with the CPU kernels as on a GPU. Only three things are rewritten: shared arrays, spinning, inline assembly.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
SOURCES = ("gae.cu", "gae_scan.cuh", "gae_tile.cuh", "ppo_loss.cu", "ppo_loss_token.cuh")
REWRITTEN = (
    (r"extern __shared__ __align__\(128\) unsigned char raw\[\];", "unsigned char* raw = emulated::dynamic_memory();"),
    (r"__shared__ ([^;\[]+?) (\w+)((?:\[[^;]*\])?);", r"auto& \2 = emulated::block_memory<\1\3, __LINE__>();"),
    (r"while \(!there\);", "while (!there && (std::this_thread::yield(), true));"),
    (r'asm volatile\("cp\.async\.bulk\.prefetch[^;]*;"[^;]*;', ""),  # a hint, to the L2
    (r'float out;\s*asm\("ex2[^;]*;"[^;]*;\s*return out;', "return std::exp2(x * 1.44269504f);"),
    (r"#if __CUDA_ARCH__ >= 900", "#if MF_EMULATED"),
)


def rewrite(text: str) -> str:
    for pattern, replacement in REWRITTEN:
        text = re.sub(pattern, replacement, text)
    assert "__shared__" not in text and "asm" not in text, "something the emulation does not know"
    return text


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("emulated")
    shutil.copytree(CSRC / "tests" / "emulated", folder, dirs_exist_ok=True)
    for name in SOURCES:
        (folder / "ops" / name).write_text(rewrite((CSRC / "ops" / name).read_text()))
    host = [CSRC / path for path in ("ops/gae_cpu.cpp", "ops/ppo_loss_cpu.cpp", "common/parallel.cpp")]
    host += [CSRC / "common" / "memory.cpp", CSRC / "tests" / "gpu" / "check_kernels.cpp"]
    command = ["g++", "-std=c++20", "-O1", "-w", "-pthread", "-DMF_BUILD_CUDA=1", f"-I{folder}", f"-I{CSRC}"]
    kernels = [folder / "ops" / name for name in SOURCES if name.endswith(".cu")]
    command += ["-include", "ops/launch.cuh", *map(str, host), "-x", "c++", *map(str, kernels)]
    result = subprocess.run([*command, "-o", str(folder / "check")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:4000]
    return folder / "check"


@pytest.mark.slow
@pytest.mark.parametrize("op", ["gae", "ppo_loss"])
def test_every_kernel_is_right(driver, op):
    result = subprocess.run([str(driver), op], capture_output=True, text=True, timeout=120)
    assert result.stdout == f"-- {op}: every kernel ran, results right\n" and result.returncode == 0, result.stdout
