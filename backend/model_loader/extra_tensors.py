"""Tensors of a checkpoint that its decoder has no place for: then the weights are not of the model in config.json."""

from __future__ import annotations

import re

from backend.checkpoints.tensor_store import TensorStore
from backend.errors import ModelError
from backend.models.config import ModelConfig
from backend.models.partition import ModelPart

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head."
_MEANINGLESS = (
    # Buffers of older files, of rotary embeddings and of the causal mask: they are computed from the config.
    *("inv_freq", ".cos_cached", ".sin_cached", "attn.bias", ".masked_bias"),
    # Activations are kept in no fewer bits here, or in bits whose scale is found anew for each row.
    *(".input_scale", ".input_zero_point", ".input_scale_ub", ".activation_scale", ".act_scale"),
    *(".output_scale", ".output_zero_point"),
    # Nor are KV blocks kept with scales from a file.
    *(".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".q_zero_point", ".k_zero_point", ".v_zero_point"),
    # Of a weight in words; it says no more than config.json does, and is checked where words are read.
    ".weight_shape",
)
"""Ends of names that public tools write, and without which a decoder computes the same."""


def refuse_extra_tensors(store: TensorStore, config: ModelConfig, part: ModelPart) -> None:
    """Looks at what is left in the files after a part of a model was read. What is not of its decoder may be.

    Raises:
        ModelError: a tensor of the decoder was not taken, and means something; names it and its file.
    """
    # In a model that also sees, the decoder's names begin in a way of their own.
    decoder = store.stored_name(f"model.{_EMBEDDING}").removesuffix(_EMBEDDING)
    extra = [
        name
        for name in store.unread()
        if (name.startswith(_HEAD) or store.stored_name(name).startswith(decoder))
        and not _is_harmless(store, config, name)
        and not _is_of_another_stage(name, config, part)
    ]
    if extra:
        others = f" (and {len(extra) - 1} others)" if len(extra) > 1 else ""
        raise ModelError(
            f"{store.path(extra[0])}: tensor {store.stored_name(extra[0])}{others} has no place in this "
            f"{config.model_type} decoder, expected {_expected(config, extra[0])}"
        )


def _is_harmless(store: TensorStore, config: ModelConfig, name: str) -> bool:
    """Whether a decoder computes the same without a tensor."""
    if name == f"{_HEAD}weight" and config.tie_word_embeddings:
        return True
    return name.endswith(_MEANINGLESS) or _is_bias_of_nothing(store, name)


def _is_of_another_stage(name: str, config: ModelConfig, part: ModelPart) -> bool:
    """Whether a tensor is the head or of a layer, which other ranks read, and check."""
    if name.startswith(_HEAD):
        return not part.is_last
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) < config.num_layers and int(layer[1]) not in part.layers


def _is_bias_of_nothing(store: TensorStore, name: str) -> bool:
    """GPTQ's tools give every layer a bias, all zero where the model has none."""
    module, _, part = name.rpartition(".")
    return part == "bias" and store.has(f"{module}.qweight") and not bool(store.raw(name).any())


def _expected(config: ModelConfig, name: str) -> str:
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= config.num_layers:
        return f"layers 0 to {config.num_layers - 1}, as num_hidden_layers says"
    return "no bias there" if name.endswith(".bias") else "no such tensor"
