"""The fused step is right in the instructions of processors that this machine need not be.

Each machine tests what its own compiler makes of ``-march=native``. Here the instructions of others are emulated in
those of AVX2 (`emulated_avx512.h`), and the tests of products, steps and answers run on kernels that are built so.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend.model_loader.source import ModelSource, cache_directory

ROOT = Path(__file__).resolve().parents[4]
HEADER = Path(__file__).with_name("emulated_avx512.h")
PROCESSORS = {
    "AVX-512": ("AVX512",),
    "AVX-512 with VNNI": ("AVX512", "VNNI"),
    "AVX-512 with VNNI and BF16": ("AVX512", "VNNI", "BF16"),
    "AVX-512 with VNNI, BF16 and AMX": ("AVX512", "VNNI", "BF16", "AMX"),
    "AVX2 with VNNI": ("AVX_VNNI",),
}
FORMATS = "tests/backend/runners/test_fused_formats.py"
FLOAT_PRODUCTS = "tests/backend/runners/fused/test_float_products.py"
PRODUCTS = (
    FLOAT_PRODUCTS,
    f"{FORMATS}::test_products_match_the_unpacked_weights",
    f"{FORMATS}::test_every_eight_bit_code_multiplies_right",
)
STEPS = (f"{FORMATS}::test_neither_chunks_nor_threads_change_a_bit", f"{FORMATS}::test_nan_rows_have_nan_logits")
BFLOAT16_ONLY = (FLOAT_PRODUCTS, *(f"{test}[bfloat16-float16]" for test in STEPS))
"""For a processor that differs from another in this format alone."""
ANSWERS = "tests/backend/runners/fused/test_answers.py::test_the_capital_of_france_is_paris"
STORED_AS = {
    "AVX-512 with VNNI": ("int8",),
    "AVX-512 with VNNI and BF16": ("bfloat16", "int4"),
    "AVX2 with VNNI": ("int4",),
}
"""What the real model is asked in; a format that is computed alike on two processors is asked on one."""
FLAGS = {"avx2", "fma", "f16c"}
DEADLINE_SECONDS = 170


def processors() -> list[str]:
    """All of them, if this processor has what emulates them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    return list(PROCESSORS) if flags >= FLAGS else []


def emulating(instructions: str, folder: Path) -> dict[str, str]:
    """The environment in which the fused step is built for other instructions, into a cache of its own."""
    compiler, cache = folder / "g++", folder / "cache" / "keepgate"
    emulated = " ".join(f"-DEMULATE_{name}" for name in PROCESSORS[instructions])
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" -march=x86-64-v3 -Wno-psabi -include {HEADER} {emulated}\n')
    compiler.chmod(0o755)
    cache.mkdir(parents=True)
    (cache / "models").symlink_to(cache_directory() / "models")  # or the model would be converted again
    return {**os.environ, "CI": "true", "CXX": str(compiler), "XDG_CACHE_HOME": str(folder / "cache")}


def run(environment: dict[str, str], *tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:]


@pytest.mark.parametrize("instructions", processors())
def test_other_processors_multiply_right(instructions: str, tmp_path: Path) -> None:
    """Products are right, and steps bit for bit the same in any batch, in the instructions of each processor."""
    run(emulating(instructions, tmp_path), *(BFLOAT16_ONLY if "AMX" in instructions else (*PRODUCTS, *STEPS)))
    built = [path.read_bytes() for path in tmp_path.glob("cache/keepgate/kernels/fused_step-*.so")]
    assert [instructions.encode() + b"\0" in library for library in built] == [True]


@pytest.mark.parametrize("instructions", [name for name in processors() if name in STORED_AS])
def test_other_processors_answer_right(source: ModelSource, instructions: str, tmp_path: Path) -> None:
    """The real model answers rightly where rows are rounded for instructions that multiply bytes or bfloat16."""
    run(emulating(instructions, tmp_path), *(f"{ANSWERS}[{name}]" for name in STORED_AS[instructions]))
