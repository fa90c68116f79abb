"""A model in Hugging Face's form with random weights: it loads at once, and computing a prompt costs more than reading
its keys and values does.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTEXT = 4096
LAYERS = 4
HEAD_DIM = 64
BLOCK = 16
BLOCK_BYTES = LAYERS * 2 * BLOCK * HEAD_DIM * 2
"""Keys and values of a block's tokens in float16, with one head for them in each layer."""
LETTERS = 256
"""Token ids with a text; two control tokens follow."""
_SPACE, _NEWLINE = "\u0120", "\u010a"
"""As byte-level vocabularies spell them."""
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def write_model(folder: Path, seed: int) -> Path:
    """Writes weights, vocabulary and chat template; the same seed gives the same bytes."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=LETTERS + 2,
        hidden_size=384,
        intermediate_size=4608,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=LETTERS,
        eos_token_id=LETTERS + 1,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    torch.nn.Module.to(model, torch.float16).save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    said = {"eos_token": "<|end|>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(said), "utf-8")
    return folder


def _tokenizer() -> Tokenizer:
    """One token for each letter of ASCII; the rest are pairs, such that each token has a text of its own."""
    spelled = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [letter for letter in spelled if letter.isascii()] + [_SPACE, _NEWLINE]
    pairs = [first + second for first in letters[:16] for second in letters[:16]]
    words = [*letters, *pairs][:LETTERS]
    vocabulary = {word: number for number, word in enumerate([*words, "<|begin|>", "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    return tokenizer
