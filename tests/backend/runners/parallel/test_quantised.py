"""Quantised models are divided among ranks without another rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backend.checkpoints.quantized.writer import write_checkpoint
from backend.model import load_part
from backend.model_loader.linears import linears
from backend.model_loader.weights import PartialOutputs, dense, load_weights
from backend.models.partition import partition
from backend.quantization.selection.choice import ROUNDINGS, quantised
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.names import Quantization
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import Scheme
from tests.backend.random_models import KINDS, Kind, chunked, random_tokens, relative_error, save
from tests.backend.runners.parallel.ranks import many_ranks, model_config, one_rank

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
KIND = Kind("Llama", {**KINDS["llama"].changes, **SHAPE, "head_dim": 64, "vocab_size": 301})
SCHEMES: dict[str, tuple[Scheme, ...]] = {
    "compressed-tensors": (IntScheme(8, activation_bits=8), IntScheme(4, 32), IntScheme(4, 256), Fp8Scheme("tensor")),
    "bitsandbytes": (Nf4Scheme(),),
}
"""Of the model's four layers, one after the other. Heads are divided in units of 128 inputs."""
FROM_FLOATS: tuple[Quantization, ...] = ("int8", "int4", "fp8", "nf4")


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with biases, in floats."""
    directory = tmp_path_factory.mktemp("floats")
    save(KIND, directory)
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    return directory


@pytest.fixture(scope="module", params=SCHEMES)
def packed(request: pytest.FixtureRequest, floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, quantised; the second layer of the first one in act-order."""
    schemes, layers = SCHEMES[request.param], {}
    for name, weight in linears(load_weights(floats, model_config(floats))).items():
        number = int(name.split(".")[2])
        linear = schemes[number % len(schemes)].pack(dense(weight).float())
        if isinstance(linear, IntLinear) and number == 1:
            linear = replace(linear, order=torch.randperm(linear.shape[1]).to(torch.int32))
        layers[name] = linear
    directory: Path = tmp_path_factory.mktemp("packed") / request.param
    write_checkpoint(directory, floats, layers)
    return directory


def assert_same_weights(directory: Path, quantization: Quantization, ranks: int, stages: int) -> None:
    """The parts of all ranks, side by side, are the whole model."""
    config = model_config(directory)
    whole, _ = quantised(load_weights(directory, config), quantization)
    for part in partition(config, ranks, stages):
        own, _ = load_part(directory, config, part, quantization)
        rows, kv_rows = (
            slice(heads.start * config.head_dim, heads.stop * config.head_dim) for heads in (part.heads, part.kv_heads)
        )
        inner = slice(part.intermediate.start, part.intermediate.stop)
        for number, layer in zip(part.layers, own.layers, strict=True):
            expected = whole.layers[number]
            assert torch.equal(layer.query.dense, expected.query.dense[rows])
            assert torch.equal(layer.key.dense, expected.key.dense[kv_rows])
            assert torch.equal(layer.value.dense, expected.value.dense[kv_rows])
            assert torch.equal(layer.gate.dense, expected.gate.dense[inner])
            assert torch.equal(layer.up.dense, expected.up.dense[inner])
            for got, all_of_it, columns in (
                (layer.output, expected.output, rows),
                (layer.down, expected.down, inner),
            ):
                if isinstance(got, PartialOutputs):
                    outputs = slice(got.outputs.start, got.outputs.stop)
                    assert torch.equal(got.dense, all_of_it.dense[outputs])
                    assert (got.inputs.start, got.inputs.stop) == (columns.start, columns.stop)
                else:
                    assert torch.equal(got.dense, all_of_it.dense[:, columns])
        if part.is_last:
            vocabulary = slice(part.vocabulary.start, part.vocabulary.stop)
            assert torch.equal(dense(own.head), dense(whole.head)[vocabulary])


@pytest.mark.parametrize("quantization", FROM_FLOATS)
def test_floats_are_rounded_as_in_one_piece(quantization: Quantization, floats: Path) -> None:
    """Each rank's part of a weight that is rounded at the start has the same codes and scales as the whole."""
    assert set(FROM_FLOATS) == set(ROUNDINGS)
    assert_same_weights(floats, quantization, 2, 1)


def test_quantised_files_are_divided_bit_for_bit(packed: Path) -> None:
    """Each rank's part of a quantised weight has the codes and scales of the files."""
    assert_same_weights(packed, "none", 2, 2)
    assert_same_weights(packed, "none", 4, 1)


def test_what_cannot_be_divided_by_inputs_is_divided_by_outputs(packed: Path) -> None:
    """With rounded rows, in act-order and in groups across ranks, a rank has some outputs of the second matrices."""
    config = model_config(packed)
    own, _ = load_part(packed, config, partition(config, 2, 1)[1], "none")
    by_outputs, by_inputs = (128, 256), (256, 128)
    kinds = [by_outputs, by_outputs, by_outputs, by_inputs] if packed.name == "compressed-tensors" else [by_inputs] * 4
    assert [layer.output.weight.shape for layer in own.layers] == kinds
    assert [isinstance(layer.output, PartialOutputs) for layer in own.layers] == [kind == by_outputs for kind in kinds]


def test_logits_of_quantised_files_are_those_of_one_device(packed: Path) -> None:
    """Ranks compute with quantised weights what one device does; kernels round activations, each in its own way."""
    tokens = random_tokens(60)
    with many_ranks(packed, 2) as many:
        assert relative_error(chunked(many, tokens, 40, 1, 19), chunked(one_rank(packed), tokens, 40, 1, 19)) < 0.02


def test_logits_of_weights_rounded_at_the_start_are_those_of_one_device(floats: Path) -> None:
    """The same for floats that each rank rounds itself."""
    tokens = random_tokens(60)
    with many_ranks(floats, 1, 2, "int4") as many:
        expected = chunked(one_rank(floats, "int4"), tokens, 40, 1, 19)
        assert relative_error(chunked(many, tokens, 40, 1, 19), expected) < 0.02
