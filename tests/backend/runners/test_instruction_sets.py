"""The native code is right on processors with fewer instructions than this one.

It is built with ``-march=native``, so each machine tests its own variant. Here a compiler that adds an older level of
x86-64 builds the others, and the tests of the native code run on them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FLAGS = {"x86-64-v3": {"avx2", "fma", "f16c"}, "x86-64-v4": {"avx512f", "avx512bw", "avx512vl"}}
"""What /proc/cpuinfo lists of a processor that has this level: v3 is AVX2, v4 AVX-512 without VNNI."""
TESTS = (
    "tests/backend/runners/test_fused_formats.py::test_products_match_the_unpacked_weights",
    "tests/backend/runners/test_fused_formats.py::test_a_step_matches_the_reference_on_its_weights",
    "tests/cache/semantic/embedding/test_native.py::test_any_width_has_the_vectors_of_the_reference",
)


def levels() -> list[str]:
    """The levels that this processor has; none on another architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    return [level for level, needed in FLAGS.items() if needed <= flags]


@pytest.mark.parametrize("level", levels())
def test_older_processors_compute_the_same(level: str, tmp_path: Path) -> None:
    """Products, steps and sentence vectors match their references when the native code is built for an older level."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" -march={level}\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert run.returncode == 0, run.stdout[-3000:]
    assert list(tmp_path.glob("cache/keepgate/kernels/fused_step-*.so"))
