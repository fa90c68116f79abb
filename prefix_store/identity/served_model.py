"""What an engine that is not of this repository serves, for its fingerprint: the files, the config, the processor."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "added_tokens.json")
_INSTANCE_FIELDS = ("transformers_version", "torch_dtype", "dtype")
"""Of a model's config: what is said elsewhere, or changes nothing."""


def model_files(
    name: str, revision: str | None, patterns: Iterable[str], option: str, cache: str | None = None
) -> list[Path]:
    """The files of a model by the patterns: of a folder, a file, or the local copy of a repository on the hub.

    Args:
        option: of the engine, that names the model.
        cache: folder of the hub's copies; None: its own.

    Raises:
        ValueError: they are not on this machine.
    """
    path = Path(name)
    if path.is_file():
        return [path]
    if not path.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            path = Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError) as error:
            raise ValueError(
                f"--{option} {name}: its files are not on this machine, expected a folder or a model of the hub's cache"
            ) from error
    if found := sorted({file for pattern in patterns for file in path.glob(pattern)}):
        return found
    raise ValueError(f"--{option} {name}: expected one of {', '.join(patterns)} in {path}")


def described(config: Mapping[str, Any]) -> tuple[str, str]:
    """What a model's config says of its rotary embedding, and all that it says of what is computed, as JSON."""
    said = {name: value for name, value in config.items() if not name.startswith("_") and name not in _INSTANCE_FIELDS}
    rope = said.get("rope_parameters") or said.get("rope_scaling")
    return json.dumps(rope, sort_keys=True, default=str), json.dumps(said, sort_keys=True, default=str)


def processor() -> str:
    """What decides which kernels are chosen: devices that round differently have different names."""
    import torch

    if torch.cuda.is_available():
        return "sm{}{}".format(*torch.cuda.get_device_capability())
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
