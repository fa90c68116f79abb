"""The fused step is right on 64-bit Arm processors, in an emulator.

The step is compiled for Arm as a program (`emulated_arm_program.cpp`) and run by QEMU as a processor that has no more
instructions than it was built for. Python and torch stay on this machine: a library with the step's C interface
(`emulated_arm_library.cpp`), which the compiler that CXX names builds in place of the step, asks the program. So the
tests of products, steps and answers run as they are.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from backend.model_loader.source import ModelSource, cache_directory
from tests.backend.runners.fused.test_emulated_processors import ANSWERS, PRODUCTS, STEPS, run

HERE = Path(__file__).parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
COMPILE_SECONDS = 120
pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason="needs g++-aarch64-linux-gnu and qemu-user-static, which emulate Arm",
)


@dataclass(frozen=True)
class Processor:
    """One that QEMU emulates, the architecture of GCC that has its instructions, and the tests that run on it."""

    emulated: str
    architecture: str
    tests: tuple[str, ...]


PROCESSORS = {
    "NEON": Processor("cortex-a72", "armv8-a", PRODUCTS),
    "NEON with dot products": Processor("neoverse-n1", "armv8.2-a+dotprod", (f"{ANSWERS}[int4]",)),
    "NEON with dot products and BF16": Processor("max", "armv8.2-a+dotprod+bf16", (*PRODUCTS, *STEPS)),
}
"""By what the fused step calls the instructions."""


def emulating(instructions: str, folder: Path) -> dict[str, str]:
    """The environment in which the fused step is computed by another processor, built into a cache of its own."""
    processor, program, cache = PROCESSORS[instructions], folder / "fused_step", folder / "cache" / "keepgate"
    flags = ("-std=c++17", "-O3", f"-march={processor.architecture}", "-fopenmp", "-static")
    subprocess.run(
        [COMPILER, *flags, "-o", program, HERE / "emulated_arm_program.cpp"], check=True, timeout=COMPILE_SECONDS
    )
    assert instructions.encode() + b"\0" in program.read_bytes()
    compiler = folder / "g++"
    names = {"EMULATOR": EMULATOR, "PROCESSOR": processor.emulated, "PROGRAM": program}
    defined = " ".join(f"-D{name}='\"{value}\"'" for name, value in names.items())
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\nwhile [ "$1" != -o ]; do shift; done\n'
        f'exec g++ -std=c++17 -O2 -shared -fPIC {defined} -o "$2" {HERE / "emulated_arm_library.cpp"}\n'
    )
    compiler.chmod(0o755)
    cache.mkdir(parents=True)
    (cache / "models").symlink_to(cache_directory() / "models")  # or the model would be converted again
    return {**os.environ, "CI": "true", "CXX": str(compiler), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.mark.parametrize("instructions", PROCESSORS)
def test_arm_computes_right(source: ModelSource, instructions: str, tmp_path: Path) -> None:
    """Products are right, steps bit for bit the same in any batch, and the real model answers README's question."""
    run(emulating(instructions, tmp_path), *PROCESSORS[instructions].tests)
