"""How many weights a model has, and what they and its keys and values take, from its ``config.json`` alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from backend.models.config import KvDtype, ModelConfig

Precision = Literal["float32", "bfloat16", "int8", "fp8", "int4", "nf4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_BITS: dict[Precision, float] = {"float32": 32, "bfloat16": 16, "int8": 8, "fp8": 8, "int4": 5, "nf4": 4.25}
"""Of a weight in a layer's matrices; int4 has a 16-bit scale and minimum for every 32 weights, nf4 a scale for 64."""
_HEAD_BITS: dict[Precision, float] = {**_BITS, "int8": 8.25, "fp8": 8.25, "int4": 8.25, "nf4": 8.25}
"""Of a weight in the head, which does not bear four bits; quantised, it is kept beside an embedding it is tied to."""


@dataclass(frozen=True)
class Parameters:
    """How many weights a model has, by how they are stored."""

    layers: int
    """In the matrices of all layers, experts included."""
    embedding: int
    """In the embedding, and as many in the head."""
    tied: bool
    """Whether embedding and head are the same weights."""
    norms_and_biases: int
    """Norms and biases, which are never quantised."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers + self.embedding * (1 if self.tied else 2) + self.norms_and_biases


def count_parameters(config: ModelConfig) -> Parameters:
    """Counts the weights of a decoder from its shape."""
    hidden, head = config.hidden_size, config.head_dim
    query, kv = config.num_heads * head, config.num_kv_heads * head
    layers = norms_and_biases = 0
    for layer in range(config.num_layers):
        layers += 2 * hidden * query + 2 * hidden * kv
        norms_and_biases += hidden * (4 if config.output_norms else 2) + (2 * head if config.qk_norm else 0)
        norms_and_biases += (query + 2 * kv if config.qkv_bias else 0) + (hidden if config.output_bias else 0)
        experts = config.layer_experts(layer)
        if experts is not None:
            layers += experts.count * (3 * hidden * experts.intermediate_size + hidden)
        else:
            layers += 3 * hidden * config.intermediate_size
            norms_and_biases += 2 * config.intermediate_size + hidden if config.mlp_bias else 0
    embedding = config.vocab_size * hidden
    return Parameters(layers, embedding, config.tie_word_embeddings, norms_and_biases + hidden)


def weight_bytes(
    parameters: Parameters, precision: Precision, *, has_embedding: bool = True, has_head: bool = True
) -> int:
    """Bytes of all weights; the embedding, norms and biases have at least 16 bits."""
    in_floats = max(16, _BITS[precision])
    bits = parameters.layers * _BITS[precision] + parameters.norms_and_biases * in_floats
    if has_embedding:
        bits += parameters.embedding * in_floats
    if has_head and not (has_embedding and parameters.tied and _HEAD_BITS[precision] == in_floats):
        bits += parameters.embedding * _HEAD_BITS[precision]
    return int(bits / 8)


def kv_bytes_per_token(config: ModelConfig, weights: Precision, kv_dtype: KvDtype = "auto") -> int:
    """Bytes of one token's keys and values over all layers.

    Args:
        weights: their precision, which says what is computed in.
        kv_dtype: auto is as computed; int8 and fp8 are one byte a number, and a float32 scale for each key and value.
    """
    vector = (4 if weights == "float32" else 2) * config.head_dim if kv_dtype == "auto" else config.head_dim + 4
    return 2 * config.num_layers * config.num_kv_heads * vector
