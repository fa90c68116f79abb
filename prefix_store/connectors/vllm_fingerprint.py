"""What engines of vLLM must have in common to share KV blocks. Nothing of it is of one instance or one start."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from prefix_store.frames.layout import BlockLayout
from prefix_store.identity.files import digest_of_files
from prefix_store.identity.fingerprint import Fingerprint

_LAYOUT = 1
"""Raised with every change of the order of a block's bytes."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "added_tokens.json")
_INSTANCE_FIELDS = ("transformers_version", "torch_dtype", "dtype")
"""Of a model's config: what is said elsewhere, or changes nothing."""


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
    weights = _files(model.model, model.revision, _WEIGHTS, "model")
    tokenizer = _files(model.tokenizer, model.tokenizer_revision, _TOKENIZER, "tokenizer")
    described = {
        name: value
        for name, value in model.hf_text_config.to_dict().items()
        if not name.startswith("_") and name not in _INSTANCE_FIELDS
    }
    mode = "eager" if model.enforce_eager else "compiled"
    kernels = ", ".join(sorted(set(attention)))
    return Fingerprint(
        weights=await digest_of_files(weights),
        tokenizer=await digest_of_files(tokenizer),
        quantisation=str(model.quantization or "none"),
        rope=json.dumps(described.get("rope_parameters") or described.get("rope_scaling"), sort_keys=True, default=str),
        geometry={
            "config": json.dumps(described, sort_keys=True, default=str),
            "block": [layout.dtype, list(layout.shape)],
            "ranks": parallel.tensor_parallel_size,
            "rank": rank,
        },
        numerics=f"vllm {version}, {model.dtype}, {kernels}, {mode}, {_processor()}",
        kv_dtype=str(cache.cache_dtype),
        layout=_LAYOUT,
        block_size=cache.block_size,
    )


def _files(name: str, revision: str | None, patterns: Iterable[str], option: str) -> list[Path]:
    """The files of a model by the patterns: of a folder, a file, or the local copy of a repository on the hub."""
    path = Path(name)
    if path.is_file():
        return [path]
    if not path.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            path = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError) as error:
            raise ValueError(
                f"--{option} {name}: its files are not on this machine, expected a folder or a model of the hub's cache"
            ) from error
    if found := sorted({file for pattern in patterns for file in path.glob(pattern)}):
        return found
    raise ValueError(f"--{option} {name}: expected one of {', '.join(patterns)} in {path}")


def _processor() -> str:
    """What decides which kernels are chosen: devices that round differently have different names."""
    if torch.cuda.is_available():
        return "sm{}{}".format(*torch.cuda.get_device_capability())
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
