"""Compiles every kernel for an H200 (sm_90) without one: ``python -m tests.backend.runners.cuda.compile_for_gpu``.

The kernels' own launchers are called, with arrays of the shapes that an 8B Llama in bfloat16 has, and Triton is told
that the device is there and that nothing is to be launched. Prints one line of JSON for each kernel.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from backend.engine.model_runner import BLOCK_SIZE
from backend.kernels.add_rms_norm import add_rms_norm
from backend.kernels.paged_decode import AttentionShape, PagedRows, paged_decode
from backend.kernels.paged_prefill import paged_prefill
from backend.kernels.rotary_write import rotary_write
from backend.kernels.sampling import sample_tokens
from backend.kernels.silu_mul import silu_mul
from backend.kernels.skinny_gemm import MAX_ROWS, skinny_gemm

HIDDEN, INNER, VOCABULARY = 4096, 14_336, 128_256
SHAPE = AttentionShape(32, 8, 128, 128**-0.5)


class AbsentH200(DriverBase):  # type: ignore[misc] # Triton has no types
    """What Triton asks before it compiles."""

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launch_all() -> None:
    """Calls every launcher, as a decode step and a mixed step of the decoder do."""

    def half(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    def whole(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    rows, width = 2, (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    keys, values = half(4, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim), half(4, SHAPE.num_kv_heads, BLOCK_SIZE, 128)
    where = PagedRows(torch.zeros(rows, 2, dtype=torch.int32), whole(0, 1), whole(0, 0))
    qkv, norm = half(rows, width), torch.ones(HIDDEN)
    add_rms_norm(half(rows, HIDDEN), None, norm, 1e-5)
    add_rms_norm(half(rows, HIDDEN), half(rows, HIDDEN), norm, 1e-5)
    for norms in (None, (half(128), half(128))):
        rotary_write(qkv, torch.zeros(64, 128), where.positions, whole(0, 16), norms, 1e-5, keys, values)
    for splits in (1, 16):
        paged_decode(qkv, keys, values, where, whole(0, 1), SHAPE, splits)
    output = half(rows, SHAPE.num_heads * SHAPE.head_dim)
    paged_prefill(qkv, keys, values, where, torch.zeros(4, 2, dtype=torch.int32), SHAPE, output)
    silu_mul(half(rows, 2 * INNER))
    for count in (1, MAX_ROWS):
        skinny_gemm(half(count, HIDDEN), half(16, HIDDEN), None)
    floats, seeds = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    sample_tokens(torch.zeros(4, VOCABULARY), floats, whole(0, 0, 0, 0), floats, floats, seeds, whole(0, 0, 0, 0))


def main() -> None:
    """Compiles, and prints what came of it."""
    run: Callable[..., Any] = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        said = {"kernel": kernel.name, "bytes": len(kernel.asm["cubin"]), "shared": kernel.metadata.shared}
        print(json.dumps(said), flush=True)
        return kernel

    JITFunction.run = compile_only
    driver.set_active(AbsentH200())
    launch_all()


if __name__ == "__main__":
    main()
