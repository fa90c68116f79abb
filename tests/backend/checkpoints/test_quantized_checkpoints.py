"""Directories with quantised weights are served with exactly the weights that they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from backend.checkpoints.quantized.writer import write_checkpoint
from backend.errors import ModelError
from backend.model_loader.linears import linears
from backend.model_loader.weights import dense, load_weights, read_config
from backend.quantization.selection.summary import summarise
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import QuantizedLinear, Scheme
from backend.runners.self_test import steps
from backend.runners.torch.runner import TorchRunner
from tests.backend.prefixes.models import write_model

SCHEMES: list[Scheme] = [IntScheme(4, 32), IntScheme(4, 32, "integer"), IntScheme(8), Fp8Scheme(), Nf4Scheme()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its weights in floats."""
    return write_model(tmp_path_factory.mktemp("plain") / "tiny", seed=1)


def quantised(plain: Path, directory: Path, scheme: Scheme) -> dict[str, QuantizedLinear]:
    """Writes the model with all its layers in a scheme, and returns the layers."""
    weights = load_weights(plain, read_config(plain))
    layers = {name: scheme.pack(dense(weight)) for name, weight in linears(weights).items()}
    write_checkpoint(directory, plain, layers)
    return layers


@pytest.mark.parametrize("scheme", SCHEMES, ids=[scheme.name for scheme in SCHEMES])
def test_a_quantised_directory_is_loaded_bit_for_bit(plain: Path, tmp_path: Path, scheme: Scheme) -> None:
    """A quantised directory is loaded by its config.json alone, bit for bit, and its logits are finite."""
    layers = quantised(plain, tmp_path / "packed", scheme)
    config = read_config(tmp_path / "packed")
    weights = load_weights(tmp_path / "packed", config)
    found = linears(weights)
    assert found.keys() == layers.keys()
    assert all(torch.equal(dense(found[name]), layers[name].unpack()) for name in layers)
    summary = summarise(weights)
    assert summary is not None
    assert summary.schemes[scheme.name] == len(layers)
    original = load_weights(plain, config)
    assert torch.equal(weights.embedding, original.embedding)
    runner = TorchRunner(config, weights, 8, 64)
    for step in steps(config.vocab_size):
        assert bool(torch.isfinite(runner.run(step).logits).all())


def test_an_unknown_quantization_method_is_refused(plain: Path, tmp_path: Path) -> None:
    """An unknown quantisation method is refused with the field of config.json and the known ones."""
    quantised(plain, tmp_path / "packed", IntScheme(8))
    file = tmp_path / "packed" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["quant_method"] = "aqlm"
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config.json.*quant_method is 'aqlm', expected one of gptq, awq"):
        load_weights(tmp_path / "packed", read_config(tmp_path / "packed"))
