"""AWQ folds scales into a layer, which then computes the same and loses less by rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.checkpoints.tensor_store import TensorStore
from backend.model_loader.weights import load_weights, read_config
from backend.quantization.calibration.decoder_layer import DecoderLayer, ExpertNames, O, V
from backend.quantization.calibration.stages import InputStatisticsByGroup, stages
from backend.quantization.methods.awq import ActivationScaling, round_clipped
from backend.quantization.methods.rounding import Rounded
from backend.quantized_weights.int_scheme import IntScheme
from tests.backend.quantization.methods.test_gptq import correlated, loss, random_weight, statistics
from tests.backend.quantization.schemes import ZEROS
from tests.backend.random_models import KINDS, Kind, random_tokens, relative_error, save

EVERY_HEAD_ITS_VALUE = Kind("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True})


def what_is_seen(layer: DecoderLayer, hidden: torch.Tensor) -> InputStatisticsByGroup:
    """The input statistics of all groups of a layer."""
    return {names: of for _, seen in stages(layer, hidden.clone()) for names, of in seen.items()}


@pytest.mark.parametrize("kind", [*KINDS, "every head its value"])
@torch.inference_mode()
def test_a_folded_layer_computes_the_same(kind: str, tmp_path: Path) -> None:
    """A folded layer computes the same in float32 for every family, with norm offsets, routers and biases."""
    save(KINDS.get(kind, EVERY_HEAD_ITS_VALUE), tmp_path)
    config = read_config(tmp_path)
    weights, names = load_weights(tmp_path, config), ExpertNames.of(TensorStore(tmp_path))
    hidden = weights.embedding[torch.from_numpy(random_tokens(160)).long().view(4, 40)].float()
    for index, of_layer in enumerate(weights.layers[:2]):
        layer = DecoderLayer(config, index, of_layer, names)
        before = {name: linear.weight.clone() for name, linear in layer.linears.items()}
        expected = layer(hidden)
        tensors = ActivationScaling(config, IntScheme(4, 32), names, torch.float32)(layer, what_is_seen(layer, hidden))
        assert relative_error(layer(hidden), expected) < 1e-5
        changed = {name for name, weight in before.items() if not torch.equal(layer.linears[name].weight, weight)}
        assert changed
        shared = config.num_heads != config.num_kv_heads  # then a value belongs to several outputs
        assert not (shared and O in changed)
        assert (f"{V}.bias" in tensors) == (config.qkv_bias and not shared)
        norm = "pre_feedforward_layernorm" if config.output_norms else "post_attention_layernorm"
        assert {"input_layernorm.weight", f"{norm}.weight"} <= set(tensors)
        assert (of_layer.router is not None) == (f"{names.router}.weight" in tensors)
        store = TensorStore(tmp_path)
        for name, tensor in tensors.items():
            assert tensor.shape == store.raw(f"model.layers.{index}.{name}").shape


@torch.inference_mode()
def test_a_norm_in_sixteen_bits_takes_back_exactly_what_the_weights_got(tmp_path: Path) -> None:
    """Each scale is adjusted to the norm weight rounded to 16 bits, so folding changes no output."""
    save(KINDS["gemma3"], tmp_path)
    config = read_config(tmp_path)
    weights, names = load_weights(tmp_path, config), ExpertNames()
    layer = DecoderLayer(config, 0, weights.layers[0], names)
    hidden = weights.embedding[torch.from_numpy(random_tokens(160)).long().view(4, 40)].float()
    expected = layer(hidden)
    tensors = ActivationScaling(config, IntScheme(4, 32), names, torch.bfloat16)(layer, what_is_seen(layer, hidden))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert relative_error(layer(hidden), expected) < 1e-5


@torch.inference_mode()
def test_scales_lose_less_on_inputs_of_unlike_magnitudes(tmp_path: Path) -> None:
    """AWQ scales lose less than plain rounding where a few channels are much larger than the others."""
    save(KINDS["smollm2"], tmp_path)
    config = read_config(tmp_path)
    weights, names, scheme = load_weights(tmp_path, config), ExpertNames(), IntScheme(4, 32)
    layer = DecoderLayer(config, 0, weights.layers[0], names)
    layer.norms["input"][::17] *= 30
    layer.norms["mlp"][::19] *= 30
    hidden = weights.embedding[torch.from_numpy(random_tokens(400)).long().view(10, 40)].float()
    expected = layer(hidden)

    def rounded() -> float:
        before = {name: linear.weight for name, linear in layer.linears.items()}
        for linear in layer.linears.values():
            if linear.weight.shape[1] % 32 == 0:
                linear.weight = scheme.pack(linear.weight).unpack()
        lost = relative_error(layer(hidden), expected)
        for name, weight in before.items():
            layer.linears[name].weight = weight
        return lost

    plain = rounded()
    ActivationScaling(config, scheme, names, torch.float32)(layer, what_is_seen(layer, hidden))
    assert rounded() < 0.8 * plain


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 16),
    scheme=st.sampled_from([IntScheme(4, 32, zero) for zero in ZEROS] + [IntScheme(4), IntScheme(8, 64)]),
)
def test_clipping_never_loses_more_of_a_groups_outputs(seed: int, rows: int, scheme: IntScheme) -> None:
    """Clipping loses no more of any group's outputs than the full range, which is one of the candidates."""
    x, weight = correlated(300, 128, seed), random_weight(rows, 128, seed + 1) ** 3
    (clipped,) = round_clipped([weight], statistics(x), scheme)
    nearest = Rounded(scheme.pack(weight))
    width = scheme.group_size or 128
    of_clipped, of_nearest = clipped.linear.unpack(), nearest.linear.unpack()
    for first in range(0, 128, width):
        part = slice(first, first + width)
        lost, before = ((x[:, part] @ (weight - of)[:, part].T).square().sum(0) for of in (of_clipped, of_nearest))
        assert bool((lost <= before * (1 + 1e-4) + 1e-12).all())


def test_clipping_helps_where_a_few_weights_are_far_out() -> None:
    """Clipping loses less where outlier weights have small inputs."""
    x, weight = correlated(300, 128, seed=1), random_weight(8, 128, seed=2)
    weight[:, ::32] = 0.3
    x[:, ::32] *= 0.01
    (clipped,) = round_clipped([weight], statistics(x), scheme := IntScheme(4, 32))
    assert loss(weight, clipped, x) < 0.7 * loss(weight, Rounded(scheme.pack(weight)), x)
