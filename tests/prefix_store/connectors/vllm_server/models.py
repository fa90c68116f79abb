"""Models for vLLM: the small one that comes with Keepgate, and random ones of other shapes."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from backend.model_loader.source import BUNDLED_MODEL, resolve_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    return resolve_model(BUNDLED_MODEL, lambda *_: None, as_floats=True).directory


def random_llama(folder: Path, *, layers: int, hidden: int, heads: int, kv_heads: int, seed: int = 0) -> Path:
    """Writes a model with random weights and SmolLM2's tokenizer."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=2 * hidden,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _written(folder, config, seed)


def random_gemma3(folder: Path) -> Path:
    """Writes a model whose layers have a sliding window, but for each sixth."""
    config = Gemma3TextConfig(
        vocab_size=49152,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=256,
        max_position_embeddings=4096,
        sliding_window=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return _written(folder, config, 0)


def _written(folder: Path, config: PreTrainedConfig, seed: int) -> Path:
    torch.manual_seed(seed)
    models: Any = AutoModelForCausalLM
    models.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    source = smollm2()
    for name in _TOKENIZER_FILES:
        shutil.copy(source / name, folder)
    return folder
