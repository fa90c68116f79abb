"""FP8 checkpoints as vLLM's tools, fbgemm and block-wise scales write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.backend.checkpoints.quantized.directories import NAME, read_linear

CODES = torch.randn(6, 10, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
ROWS = torch.linspace(0.5, 2, 6)


def read(directory: Path, scale: str, scales: torch.Tensor, **config: Any) -> tuple[str, torch.Tensor]:
    save_file({f"{NAME}.weight": CODES, f"{NAME}.{scale}": scales}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}), encoding="utf-8")
    linear = read_linear(directory, NAME, 6, 10)
    assert linear is not None
    return linear.scheme.name, linear.unpack()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_the_whole_weight_has_one_scale(shape: tuple[int, ...], tmp_path: Path) -> None:
    """A scale of one number, of any shape, is the scale of the whole weight."""
    name, weight = read(tmp_path, "weight_scale", torch.full(shape, 0.25), quant_method="fp8")
    assert name == "fp8-tensor"
    assert torch.equal(weight, CODES.float() / 4)


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_each_row_has_a_scale(shape: tuple[int, ...], method: str, tmp_path: Path) -> None:
    """A scale for each row is read under both method names and in bfloat16."""
    name, weight = read(tmp_path, "weight_scale", ROWS.view(shape).bfloat16(), quant_method=method)
    assert name == "fp8"
    assert torch.equal(weight, CODES.float() * ROWS.bfloat16().float().unsqueeze(1))


def test_each_block_has_a_scale(tmp_path: Path) -> None:
    """A scale for each block is applied, to smaller last blocks too, and the weight is rounded once to bfloat16."""
    scales = torch.tensor([[1.0, 2.0, 3.0], [5.0, 7.0, 11.0]])
    config = {"quant_method": "fp8", "weight_block_size": [4, 4], "activation_scheme": "dynamic"}
    name, weight = read(tmp_path, "weight_scale_inv", scales, **config)
    expected = CODES.float().clone()
    for row in range(6):
        for column in range(10):
            expected[row, column] *= scales[row // 4, column // 4]
    assert name == "bfloat16"
    assert torch.equal(weight, expected.bfloat16().float())
