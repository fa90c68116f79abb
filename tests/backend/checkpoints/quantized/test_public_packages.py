"""Files of public packages are read as those packages read them. See tests/data/quantised/README.md."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.quantized_weights.int_scheme import IntLinear
from backend.quantized_weights.quantized_linear import reference
from tests.backend.checkpoints.quantized.directories import read_linear

DATA = Path(__file__).parents[3] / "data" / "quantised"
KEY, DOWN = "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj"
SHAPES = {KEY: (32, 64), DOWN: (64, 128)}
BOTH = ("int4-g32", "int4-g32")
SCHEMES: dict[str, tuple[str | None, str | None]] = {
    "gptqmodel-gptq": BOTH,
    "gptqmodel-gptq-order": ("int4-asym-g32", "int4-asym-g32"),
    "gptqmodel-gptq-v2": ("int4-asym-g32", "int4-asym-g32"),
    "gptqmodel-gptq-int8": ("int8", "int8"),
    "autoawq-gemm": ("int4-asym-g32", "int4-asym-g32"),
    "llmcompressor-int4": BOTH,
    "llmcompressor-int4-asymmetric": ("int4-asym-g32", "int4-asym-g32"),
    "llmcompressor-w8a8": ("int8-dynamic", None),
    "llmcompressor-fp8": ("fp8", "fp8"),
    "llmcompressor-fp8-block": ("bfloat16", "bfloat16"),
    "llmcompressor-mixed": ("int8-asym", "int4"),
    "bitsandbytes-nf4": ("nf4-single", "nf4-single"),
    "bitsandbytes-nf4-double": ("nf4", "nf4"),
    "bitsandbytes-int8": ("int8", "int8"),
}
"""The schemes of `KEY` and `DOWN` in each folder; None: plain."""


@pytest.mark.parametrize("folder", SCHEMES)
def test_weights_equal_those_of_the_package(folder: str) -> None:
    """Weights equal the package's bit for bit, except for rounding of LLM.int8 products and of FP8 blocks."""
    said = load_file(DATA / "dequantised.safetensors")
    for name, scheme in zip((KEY, DOWN), SCHEMES[folder], strict=True):
        linear = read_linear(DATA / folder, name, *SHAPES[name])
        assert (None if linear is None else linear.scheme.name) == scheme
        if linear is None:
            continue
        weight, expected = linear.unpack(), said[f"{folder}/{name}"]
        assert tuple(weight.shape) == SHAPES[name]
        # A scale of LLM.int8 is no half float, so that a product with it is rounded; blocks are rounded to bfloat16.
        rounded = {"bitsandbytes-int8": 2.0**-22 * float(expected.abs().max())}.get(folder, 0.0)
        relative = 2.0**-8 if folder == "llmcompressor-fp8-block" else 0.0
        torch.testing.assert_close(weight[:16], expected, rtol=relative, atol=rounded)


@pytest.mark.parametrize("folder", SCHEMES)
def test_a_weight_that_was_read_multiplies_right(folder: str) -> None:
    """A weight that was read from any layout multiplies as its unpacked weight."""
    linear = read_linear(DATA / folder, KEY, *SHAPES[KEY])
    assert linear is not None
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear.matmul(x).double(), reference(linear, x), rtol=1e-3, atol=1e-3)


def test_act_order_is_kept() -> None:
    """A weight with act-order keeps the permutation of its inputs."""
    linear = read_linear(DATA / "gptqmodel-gptq-order", DOWN, *SHAPES[DOWN])
    assert isinstance(linear, IntLinear)
    assert linear.order is not None
    assert sorted(linear.order.tolist()) == list(range(128)) != linear.order.tolist()


def test_gptq_zeros_that_borrow_between_codes_are_read_right(tmp_path: Path) -> None:
    """Zeros of the first GPTQ format that borrow from a neighbour in their word are read as in version 2."""
    first, second = tmp_path / "gptq", tmp_path / "gptq_v2"
    for directory in (first, second):
        shutil.copytree(DATA / "gptqmodel-gptq-v2", directory)
    tensors = load_file(second / "model.safetensors")
    zeros = torch.randint(-(2**31), 2**31, (2, 4), generator=torch.Generator().manual_seed(1)).int()
    save_file(tensors | {f"{KEY}.qzeros": zeros}, second / "model.safetensors")
    save_file(tensors | {f"{KEY}.qzeros": zeros - 0x11111111}, first / "model.safetensors")
    config = (first / "config.json").read_text(encoding="utf-8")
    (first / "config.json").write_text(config.replace('"gptq_v2"', '"gptq"'), encoding="utf-8")
    one, two = (read_linear(directory, KEY, *SHAPES[KEY]) for directory in (first, second))
    assert isinstance(one, IntLinear)
    assert isinstance(two, IntLinear)
    assert two.zeros is not None
    assert 0 in two.zeros.flatten().tolist()
    assert torch.equal(one.unpack(), two.unpack())
