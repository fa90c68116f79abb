"""Round to nearest: every weight of a model by itself, without a look at what it is multiplied with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from backend.quantization.errors import CannotQuantize
from backend.quantization.quantized_linear import QuantizedLinear, Scheme
from backend.weights import LayerWeights, Linear, Mlp, ModelWeights

Weight = torch.Tensor | QuantizedLinear


def rounded(weights: ModelWeights, scheme: Scheme, head: Scheme | None = None) -> ModelWeights:
    """A model whose linear layers are kept in a scheme. What is quantised already, the embedding and norms stay.

    Args:
        head: of the matrix that gives logits; None: it stays as it is.

    Raises:
        CannotQuantize: a weight does not fit; names it.
    """
    packed = map_linears(weights, lambda name, weight: pack(name, weight, scheme))
    return packed if head is None else replace(packed, head=pack("lm_head", packed.head, head))


def pack(name: str, weight: Weight, scheme: Scheme) -> QuantizedLinear:
    """A weight in a scheme, or as it is where it is quantised already. Raises CannotQuantize, which names it."""
    if not isinstance(weight, torch.Tensor):
        return weight
    try:
        return scheme.pack(weight)
    except CannotQuantize as error:
        raise CannotQuantize(f"{name}: {error}") from error


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
