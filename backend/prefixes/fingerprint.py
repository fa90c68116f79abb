"""What engines must have in common with this one to share KV blocks with it."""

from __future__ import annotations

import dataclasses

from backend.engine.model_runner import BLOCK_SIZE
from backend.model import ServedModel
from backend.models.config import ModelConfig
from prefix_store.frames.layout import BlockLayout
from prefix_store.identity.encoding import Value
from prefix_store.identity.files import digest_of_files
from prefix_store.identity.fingerprint import Fingerprint

_LAYOUT = 1
"""Raised with every change of how a runner computes or orders a block's numbers that nothing else here shows."""


async def fingerprint_of(model: ServedModel, layout: BlockLayout) -> Fingerprint:
    """The fingerprint of a served model's KV blocks; reads its files in a thread.

    Raises:
        OSError: a file cannot be read.
    """
    runner, config = model.runner, model.runner.config
    directory = model.directory
    return Fingerprint(
        weights=await digest_of_files(sorted(directory.glob("*.safetensors"))),
        tokenizer=await digest_of_files([directory / "tokenizer.json"]),
        quantisation=_quantisation(model),
        rope=[_rope(config, layer) for layer in range(config.num_layers)],
        geometry={
            "model_type": config.model_type,
            "layers": config.num_layers,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "windows": list(config.windows),
            "config": repr(dataclasses.replace(config, eos_token_ids=(), max_position_embeddings=0)),
            "block": [layout.dtype, list(layout.shape), layout.axes, layout.keys_transposed],
        },
        numerics=f"{runner.name}, {runner.kernels}",
        kv_dtype=runner.kv_precision,
        layout=_LAYOUT,
        block_size=BLOCK_SIZE,
    )


def _quantisation(model: ServedModel) -> str:
    """What the weights are computed with, and of quantised ones how many are kept in what."""
    schemes = {} if model.quantization is None else model.quantization.schemes
    return ", ".join([model.runner.weights_precision, *(f"{name}: {count}" for name, count in sorted(schemes.items()))])


def _rope(config: ModelConfig, layer: int) -> Value:
    rope = config.rope(layer)
    return None if rope is None else [rope.theta, None if rope.scaling is None else repr(rope.scaling)]
