"""What engines of vLLM must have in common to share KV blocks. Nothing of it is of one instance or one start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prefix_store.frames.layout import BlockLayout
from prefix_store.identity.files import digest_of_files
from prefix_store.identity.fingerprint import Fingerprint
from prefix_store.identity.served_model import TOKENIZER, WEIGHTS, described, model_files, processor

_LAYOUT = 1
"""Raised with every change of the order of a block's bytes."""


async def fingerprint_of(
    config: Any, version: str, attention: Iterable[str], layout: BlockLayout, rank: int
) -> Fingerprint:
    """The fingerprint of one worker's part of the KV blocks; reads the model's files in a thread.

    Args:
        config: a ``VllmConfig``.
        version: of vLLM.
        attention: the kernels of the attention layers.
        layout: of a block.
        rank: of the worker among those that have a part of each block.

    Raises:
        ValueError: the model's files are not on this machine.
        OSError: a file cannot be read.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    weights = model_files(model.model, model.revision, WEIGHTS, "model")
    tokenizer = model_files(model.tokenizer, model.tokenizer_revision, TOKENIZER, "tokenizer")
    rope, described_config = described(model.hf_text_config.to_dict())
    mode = "eager" if model.enforce_eager else "compiled"
    kernels = ", ".join(sorted(set(attention)))
    return Fingerprint(
        weights=await digest_of_files(weights),
        tokenizer=await digest_of_files(tokenizer),
        quantisation=str(model.quantization or "none"),
        rope=rope,
        geometry={
            "config": described_config,
            "block": [layout.dtype, list(layout.shape)],
            "ranks": parallel.tensor_parallel_size,
            "rank": rank,
        },
        numerics=f"vllm {version}, {model.dtype}, {kernels}, {mode}, {processor()}",
        kv_dtype=str(cache.cache_dtype),
        layout=_LAYOUT,
        block_size=cache.block_size,
    )
