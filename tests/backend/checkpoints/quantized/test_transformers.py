"""transformers, with compressed-tensors or bitsandbytes, computes the same from the written files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

from backend.checkpoints.quantized.writer import write_checkpoint
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import QuantizedLinear, Scheme

SCHEMES: tuple[Scheme, ...] = (
    IntScheme(4),
    IntScheme(4, 32),
    IntScheme(8),
    IntScheme(8, 32),
    IntScheme(8, None, "integer"),
    Fp8Scheme("row"),
    Fp8Scheme("tensor"),
)


def save_random(directory: Path, tied: bool = False) -> None:
    """A random model in float32."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, dtype="float32", tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random model."""
    directory = tmp_path_factory.mktemp("plain") / "model"
    save_random(directory)
    return directory


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(1, 20).view(1, -1)).logits
    return found


def quantised(model: LlamaForCausalLM, schemes: dict[str, Scheme]) -> dict[str, QuantizedLinear]:
    """Packs the linear layers with these name endings, and makes the model compute with them."""
    packed: dict[str, QuantizedLinear] = {}
    for name, module in model.named_modules():
        for end, scheme in schemes.items():
            if isinstance(module, torch.nn.Linear) and name.endswith(end):
                packed[name] = scheme.pack(module.weight.detach())
                module.weight.data = packed[name].unpack()
    return packed


def check(source: Path, schemes: dict[str, Scheme], target: Path) -> None:
    """Writes the layers, and compares transformers' logits of the files with those of the packed weights."""
    expected = LlamaForCausalLM.from_pretrained(source)
    layers = quantised(expected, schemes)
    assert layers
    write_checkpoint(target, source, layers)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    torch.testing.assert_close(logits(loaded), logits(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES, ids=[scheme.name for scheme in SCHEMES])
def test_every_scheme_gives_the_same_logits(scheme: Scheme, source: Path, tmp_path: Path) -> None:
    """Every scheme gives the same logits with a plain head."""
    check(source, {"_proj": scheme}, tmp_path / "written")


def test_rounded_rows_give_the_same_logits(source: Path, tmp_path: Path) -> None:
    """Dynamic 8-bit activations give the logits of compressed-tensors' rounding, which has 127.5 steps to each side."""

    def rounded(_: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        steps = given[0].abs().amax(dim=-1, keepdim=True) / 127.5
        return (torch.round(given[0] / steps).clamp(-128, 127) * steps,)

    expected = LlamaForCausalLM.from_pretrained(source)
    write_checkpoint(tmp_path / "written", source, quantised(expected, {"_proj": IntScheme(8, activation_bits=8)}))
    unrounded = logits(expected)
    for name, module in expected.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "written"))
    # Some values are so near the middle of two steps that the last bit decides.
    assert (found - logits(expected)).norm() < 0.2 * (found - unrounded).norm()


def test_zeros_give_the_same_logits(source: Path, tmp_path: Path) -> None:
    """Zero points give the same logits when transformers dequantises at load time, which it needs for packed zeros."""
    options = CompressedTensorsConfig(dequantize=True)
    # The package widens to the dtype of the scales, which are half floats.
    layers = quantised(expected := LlamaForCausalLM.from_pretrained(source), {"_proj": IntScheme(4, 32, "integer")})
    write_checkpoint(tmp_path / "written", source, layers)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "written", quantization_config=options)
    torch.testing.assert_close(logits(loaded), logits(expected), rtol=1e-2, atol=1e-2)


def test_mixed_precision_gives_the_same_logits(source: Path, tmp_path: Path) -> None:
    """Several groups in several formats with unquantised layers give the same logits."""
    schemes: dict[str, Scheme] = {"mlp.gate_proj": IntScheme(4, 32), "down_proj": IntScheme(8), "v_proj": Fp8Scheme()}
    check(source, schemes, tmp_path / "written")
    config = json.loads((tmp_path / "written/config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert sorted(group["format"] for group in config["config_groups"].values()) == [
        "float-quantized", "int-quantized", "pack-quantized",
    ]  # fmt: skip
    assert "model.layers.0.self_attn.q_proj" in config["ignore"]


@pytest.mark.parametrize("double", [True, False])
def test_nf4_gives_the_same_weights_and_logits(double: bool, source: Path, tmp_path: Path) -> None:
    """bitsandbytes reads the written NF4 weights bit for bit and computes the same logits."""
    expected = LlamaForCausalLM.from_pretrained(source)
    layers = quantised(expected, {"_proj": Nf4Scheme(double=double)})
    write_checkpoint(tmp_path / "written", source, layers)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    for name, layer in layers.items():
        module = loaded.get_submodule(name)
        assert isinstance(module, Linear4bit)
        assert isinstance(module.weight, Params4bit)
        assert module.weight.quant_state is not None
        assert module.weight.quant_state.nested is double
        # Before the first forward pass, which packs the codes anew on processors with AVX512-BF16.
        assert torch.equal(dequantize_4bit(module.weight.data, module.weight.quant_state), layer.unpack())
    # In inference mode bitsandbytes computes in bfloat16 where the processor has AVX512-BF16.
    loaded.train()
    torch.testing.assert_close(logits(loaded), logits(expected), rtol=1e-4, atol=1e-4)


def test_a_quantised_head_gives_the_same_logits(source: Path, tmp_path: Path) -> None:
    """A quantised head gives the same logits."""
    check(source, {"lm_head": IntScheme(8), "_proj": IntScheme(8)}, tmp_path / "written")


def test_a_quantised_head_that_was_tied_gives_the_same_logits(tmp_path: Path) -> None:
    """A quantised head that was tied has a weight of its own, and the embedding stays as it is."""
    save_random(tmp_path / "plain", tied=True)
    expected = LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    head = IntScheme(8).pack(expected.lm_head.weight.detach())
    expected.lm_head.weight = torch.nn.Parameter(head.unpack())
    write_checkpoint(tmp_path / "written", tmp_path / "plain", {"lm_head": head})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    torch.testing.assert_close(logits(loaded), logits(expected), rtol=1e-4, atol=1e-4)
