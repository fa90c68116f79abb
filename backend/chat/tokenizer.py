"""A model's tokenizer and chat template, from its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backend.chat.chat_template import ChatTemplate
from backend.errors import ModelError
from backend.models.config import ModelConfig
from backend.text.detokenizer import TokenBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class ModelTokenizer:
    """A model's tokenizer, the bytes of its tokens, and its chat template."""

    fast: Tokenizer
    token_bytes: TokenBytes
    chat_template: ChatTemplate | None
    """None: a base model, for completions only."""

    @classmethod
    def load(cls, directory: Path, config: ModelConfig, chat_template: str | None = None) -> ModelTokenizer:
        """Reads ``tokenizer.json`` and the chat template, or takes ``chat_template`` in its place.

        Raises:
            ModelError: a file is missing or not supported.
        """
        # Parallelism is for batches of prompts; the tokenizer's threads would never be used.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{directory}: no tokenizer.json here; expected a fast tokenizer")
        try:
            text = path.read_text("utf-8")
            tokenizer = Tokenizer.from_str(text)
            # Settings that the file keeps from its last use. Prompts that are too long are refused, not truncated.
            tokenizer.no_truncation()
            tokenizer.no_padding()
        except Exception as error:  # tokenizers raises no narrower class
            raise ModelError(f"{path}: not a tokenizer that can be loaded ({error})") from error
        return cls(tokenizer, TokenBytes(text, config.vocab_size), ChatTemplate.load(directory, chat_template))
