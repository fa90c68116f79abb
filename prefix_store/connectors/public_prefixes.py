"""Prefixes that an operator publishes, made into tokens as vLLM makes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from prefix_store.identity.keys import Published


class _Chat(msgspec.Struct):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def publish(files: Iterable[str], model_config: Any, published: Published) -> None:
    """Publishes what is in files: a JSON object with ``messages`` and ``tools`` as in a chat, or else a text.

    Of a conversation its messages count, without the opening of the answer. Engines that share blocks must publish the
    same.

    Raises:
        ValueError: names the file, and what is wrong with it.
    """
    tokenizer = None
    for name in files:
        try:
            text = Path(name).read_text("utf-8")
            chat = msgspec.json.decode(text, type=_Chat) if text.lstrip().startswith("{") else None
        except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
            raise ValueError(f"public_prefix {name}: {error}") from error
        if tokenizer is None:
            from vllm.tokenizers import cached_tokenizer_from_config

            tokenizer = cached_tokenizer_from_config(model_config)
        if chat is None:
            ids = tokenizer.encode(text)
        else:
            ids = tokenizer.apply_chat_template(
                chat.messages, tools=chat.tools, add_generation_prompt=False, tokenize=True, return_dict=False
            )
        if not published.publish(ids):
            raise ValueError(
                f"public_prefix {name}: {len(ids)} tokens fill no block; expected at least {published.block_size}"
            )
