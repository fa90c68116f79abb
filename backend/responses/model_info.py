"""The response of ``GET /v1/model/info``: how the model is computed, and what fits its memory."""

from __future__ import annotations

import dataclasses
from typing import Any

from backend.engine.block_manager import blocks_at_most
from backend.engine.model_runner import BLOCK_SIZE, ModelRunner
from backend.engine.stats import EngineStats
from backend.model import ServedModel

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_SAME_BITS = "each row of a step is computed on its own, bit for bit the same in any batch, chunk or prefix hit"
_OTHER_BATCH = "matrix products round differently for other batch shapes, which can change a close choice"
_LOSSY = "prefixes are stored as {}, so the answer to a restored prompt may differ from that to a computed one"


def describe(model: ServedModel, stats: EngineStats, lossy_codec: str | None) -> dict[str, Any]:
    """The response. Memory is in bytes; a block holds ``tokens_per_block`` tokens.

    Args:
        lossy_codec: name of the lossy codec that stores prefixes; None: all codecs are exact.
    """
    config, runner = model.config, model.runner
    template = model.tokenizer.chat_template
    lengths = [length for length in _LENGTHS if length < model.max_context] + [model.max_context]
    return {
        "id": model.name,
        "architecture": config.model_type,
        "runner": runner.name,
        "deterministic": runner.deterministic and lossy_codec is None,
        "deterministic_because": _determinism_reason(runner, lossy_codec),
        "weights_precision": runner.weights_precision,
        "quantization": None if model.quantization is None else dataclasses.asdict(model.quantization),
        "kv_precision": runner.kv_precision,
        "kv_bytes_per_token": runner.kv_bytes_per_token,
        "kv_bytes_per_token_outside_window": _outside_window(runner),
        "attention_window": runner.config.attention_window,
        "max_context": model.max_context,
        "sampling_defaults": dataclasses.asdict(model.sampling),
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "embedding_dimensions": config.hidden_size,
        "chat": template is not None,
        "chat_template": None if template is None else "replaced" if template.replaces else "model",
        "tools": None if template is None else "generic" if template.generic_tools else "template",
        "reasoning": template is not None and template.reasoning_format is not None,
        "kv_blocks": {
            "total": runner.num_blocks,
            "free": stats.free_blocks,
            "cached": stats.cached_blocks,
            "held": stats.held_blocks,
            "tokens_per_block": BLOCK_SIZE,
        },
        "parallel": None if model.parallel is None else model.parallel.described(),
        "feasible_batch": {
            str(length): min(
                stats.max_batch,
                runner.num_blocks // blocks_at_most(length, runner.config.attention_window, stats.step_tokens),
            )
            for length in lengths
        },
    }


def _determinism_reason(runner: ModelRunner, lossy_codec: str | None) -> str:
    if not runner.deterministic:
        return _OTHER_BATCH
    return _SAME_BITS if lossy_codec is None else _LOSSY.format(lossy_codec)


def _outside_window(runner: ModelRunner) -> int:
    """Bytes kept of a token that has left the windows of some layers, for those layers.

    A block is of all layers: as long as one of them sees it, the others keep theirs. Where none does, it is given back.
    """
    config = runner.config
    windowed = sum(window is not None for window in config.windows)
    return 0 if config.attention_window is not None else runner.kv_bytes_per_token * windowed // config.num_layers
