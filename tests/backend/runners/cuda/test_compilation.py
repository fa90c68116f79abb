"""The kernels that the interpreter runs also compile for a GPU, in bfloat16, which the interpreter cannot multiply."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

SHARED_MEMORY = 227 * 1024
"""Bytes that one program can have on an H200."""


def test_every_kernel_compiles_for_an_h200(tmp_path: Path) -> None:
    """Every kernel of an 8B Llama in bfloat16 compiles for an H200 and fits its shared memory, without a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backend.runners.cuda.compile_for_gpu"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[4],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert Counter(kernel["kernel"] for kernel in compiled) == {
        "_add_rms_norm": 2,
        "_rotary_write": 2,
        "_decode_split": 2,
        "_reduce": 1,
        "_prefill": 1,
        "_silu_mul": 1,
        "_skinny_gemm": 2,
        "_sample": 1,
    }
    assert all(kernel["bytes"] > 0 and kernel["shared"] <= SHARED_MEMORY for kernel in compiled)
