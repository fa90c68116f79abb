"""The linear layers of a model, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from backend.model_loader.weights import LayerWeights, Linear, Mlp, ModelWeights, dense
from backend.quantized_weights.quantized_linear import QuantizedLinear

Weight = torch.Tensor | QuantizedLinear


def as_floats(weights: ModelWeights) -> ModelWeights:
    """What the bits of quantised weights say, as floats. Where a scheme rounds activations too, weights stay."""

    def plain(weight: Weight) -> Weight:
        rounds_rows = not isinstance(weight, torch.Tensor) and weight.scheme.activation_bits < 16
        return weight if rounds_rows else dense(weight)

    return replace(map_linears(weights, lambda name, weight: plain(weight)), head=plain(weights.head))


def linears(weights: ModelWeights) -> dict[str, Weight]:
    """The weights [out, in] of all linear layers but the head; see `map_linears` for their names."""
    found: dict[str, Weight] = {}

    def note(name: str, weight: Weight) -> Weight:
        found[name] = weight
        return weight

    map_linears(weights, note)
    return found


def map_linears(weights: ModelWeights, change: Callable[[str, Weight], Weight]) -> ModelWeights:
    """A model with other weights in its linear layers, by Hugging Face's names for those without a mixture."""
    return replace(weights, layers=tuple(_layer(index, layer, change) for index, layer in enumerate(weights.layers)))


def _layer(index: int, layer: LayerWeights, change: Callable[[str, Weight], Weight]) -> LayerWeights:
    at = f"model.layers.{index}"

    def linear(name: str, of: Linear) -> Linear:
        return replace(of, weight=change(f"{at}.{name}", of.weight))

    def mlp(name: str, of: Mlp) -> Mlp:
        return Mlp(
            gate=linear(f"{name}.gate_proj", of.gate),
            up=linear(f"{name}.up_proj", of.up),
            down=linear(f"{name}.down_proj", of.down),
        )

    places = ["mlp"] if layer.router is None else [f"mlp.experts.{expert}" for expert in range(len(layer.mlps))]
    return replace(
        layer,
        query=linear("self_attn.q_proj", layer.query),
        key=linear("self_attn.k_proj", layer.key),
        value=linear("self_attn.v_proj", layer.value),
        output=linear("self_attn.o_proj", layer.output),
        mlps=tuple(mlp(place, part) for place, part in zip(places, layer.mlps, strict=True)),
    )
