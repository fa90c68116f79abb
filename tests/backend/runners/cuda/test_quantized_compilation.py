"""The kernels for quantised weights as the compiler for an H200 makes them: ``python -m`` of this module compiles them.

The interpreter takes more than the compiler does, multiplies no bfloat16, and says nothing of registers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

SHARED_MEMORY = 227 * 1024
"""Bytes that the programs of one multiprocessor of an H200 have."""


def test_every_quantized_kernel_compiles_for_an_h200(tmp_path: Path) -> None:
    """Every quantised kernel compiles for an H200 in bfloat16 without spills, and two fit a multiprocessor."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.backend.runners.cuda.test_quantized_compilation"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[4],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kernel["kernel"] for kernel in compiled] == [
        "_quantized_skinny_gemm",
        "_quantized_skinny_gemm",
        "_quantized_gemm",
        "_sum_parts",
        "_quantized_gemm",
        "_dequantize",
        "_quantized_skinny_gemm",
        "_round_rows",
    ]
    for kernel in compiled:
        assert 2 * kernel["shared"] <= SHARED_MEMORY, kernel
        assert kernel["stack"] == 0, kernel
        assert kernel["matrix_units"] == (kernel["kernel"] == "_quantized_gemm"), kernel


def launch_all() -> None:
    """Calls every launcher: INT4 with zeros and groups of 128, by 1, 4, 16 and 64 rows; NF4; eight-bit floats."""
    from backend.kernels.dequantize import dequantize
    from backend.kernels.fp8_gemm import round_rows
    from backend.kernels.quantized_gemm import quantized_gemm
    from backend.kernels.quantized_skinny_gemm import quantized_skinny_gemm
    from backend.kernels.quantized_weight import on_device
    from backend.quantized_weights.fp8_scheme import Fp8Scheme
    from backend.quantized_weights.int_scheme import IntScheme
    from backend.quantized_weights.nf4_scheme import Nf4Scheme

    def rows(count: int) -> torch.Tensor:
        return torch.zeros(count, 1024, dtype=torch.bfloat16)

    def weight(scheme: Any, outputs: int = 64) -> Any:
        return on_device(scheme.pack(torch.randn(outputs, 1024)), torch.device("cpu"))

    integers = weight(IntScheme(4, 128, "integer"))
    quantized_skinny_gemm(rows(1), integers, None)
    quantized_skinny_gemm(rows(4), integers, None)
    quantized_gemm(rows(16), integers, None)
    # So many outputs that inputs are not cut into parts.
    quantized_gemm(rows(64), weight(IntScheme(4, 128, "integer"), 20_000), None)
    dequantize(integers, torch.bfloat16)
    quantized_skinny_gemm(rows(1), weight(Nf4Scheme()), None)
    round_rows(rows(64), weight(Fp8Scheme()))


def stack_bytes(code: bytes) -> int:
    """Local memory of a thread: registers that are kept in memory for lack of others are there."""
    import triton

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", said)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of a stack: {said}")
    return int(found[1])


def main() -> None:
    """Compiles, launches nothing, and prints a line of JSON for each kernel."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from tests.backend.runners.cuda.compile_for_gpu import AbsentH200

    run: Callable[..., Any] = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        said = {
            "kernel": kernel.name,
            "shared": kernel.metadata.shared,
            "stack": stack_bytes(kernel.asm["cubin"]),
            "matrix_units": "wgmma.mma_async" in kernel.asm["ptx"],
        }
        print(json.dumps(said), flush=True)
        return kernel

    JITFunction.run = compile_only
    driver.set_active(AbsentH200())
    launch_all()


if __name__ == "__main__":
    main()
