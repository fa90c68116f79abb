"""Models for vLLM: the small one that comes with Keepgate, and random ones of other shapes."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from backend.model_loader.source import BUNDLED_MODEL, resolve_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    return resolve_model(BUNDLED_MODEL, lambda *_: None, as_floats=True).directory


def random_llama(folder: Path, *, layers: int, hidden: int, heads: int, kv_heads: int, seed: int = 0) -> Path:
    """Writes a model with random weights and SmolLM2's tokenizer."""
    torch.manual_seed(seed)
    source = smollm2()
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
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        shutil.copy(source / name, folder)
    return folder
