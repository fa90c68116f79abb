"""What Ollama's clients ask about models: GET /api/tags, /api/ps and /api/version, and POST /api/show.

An upstream of another kind says little of its models; a client gets zeros and empty texts for the rest.
"""

import hashlib
from collections.abc import Collection, Iterable
from typing import Any

from gateway.surfaces.surface import Json
from gateway.surfaces.timestamps import rfc3339

_API_VERSION = "0.12.11"
"""Of the Ollama whose API this is. Some clients want a lowest one, or ask it for what it has."""

_LATEST = ":latest"
_NEVER = "2300-01-01T00:00:00Z"
_ALL_MODELS = ("completion", "tools")


def version() -> Json:
    return {"version": _API_VERSION}


def known_as(name: str, listed: Collection[str]) -> str:
    """The listed model that a client means: `x` by `x:latest`, which Ollama's clients write for it."""
    short = name.removesuffix(_LATEST)
    return short if name not in listed and short in listed else name


def tags(models: Iterable[Json]) -> Json:
    """The answer to GET /api/tags, of OpenAI's model objects."""
    return {"models": [{**_entry(model), "modified_at": rfc3339(model.get("created"))} for model in models]}


def ps(models: Iterable[Json]) -> Json:
    """The answer to GET /api/ps: every model is loaded, and stays so."""
    return {
        "models": [
            {**_entry(model), "expires_at": _NEVER, "size_vram": 0, "context_length": _context_length(model, {})}
            for model in models
        ]
    }


def show(model: Json, info: Json | None = None) -> Json:
    """The answer to POST /api/show. `info` is what the in-repo engine says of itself at GET /v1/model/info."""
    known = info or {}
    architecture = _text(known.get("architecture")) or "unknown"
    capabilities = list(_ALL_MODELS)
    if info is not None:
        capabilities = [
            "completion",
            *(["tools"] if info.get("tools") else []),
            *(["thinking"] if info.get("reasoning") else []),
        ]
    sizes = {
        "context_length": _context_length(model, known),
        "embedding_length": known.get("hidden_size"),
        "block_count": known.get("num_layers"),
        "attention.head_count_kv": known.get("num_kv_heads"),
        "vocab_size": known.get("vocab_size"),
    }
    described = {f"{architecture}.{name}": size for name, size in sizes.items() if type(size) is int and size}
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(known),
        "model_info": {"general.architecture": architecture, "general.basename": model["id"], **described},
        "capabilities": capabilities,
        "modified_at": rfc3339(model.get("created")),
    }


def _entry(model: Json) -> Json:
    name = model["id"]
    # Clients compare digests to see whether a model has changed.
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return {"name": name, "model": name, "size": 0, "digest": digest, "details": _details({})}


def _details(info: Json) -> Json:
    family = _text(info.get("architecture"))
    quantization = info.get("quantization")
    schemes = quantization.get("schemes") if isinstance(quantization, dict) else None
    level = next(iter(schemes), "") if isinstance(schemes, dict) else _text(info.get("weights_precision"))
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": level,
    }


def _context_length(model: Json, info: Json) -> int:
    """0 if it is unknown. vLLM and the like say it among their models."""
    lengths = (info.get("max_context"), model.get("max_model_len"), model.get("context_length"))
    return next((length for length in lengths if type(length) is int and length > 0), 0)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
