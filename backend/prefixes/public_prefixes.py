"""Prefixes that an operator publishes: their blocks are the same for all tenants."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from backend.errors import ModelError, RequestError
from backend.protocol import TokenizeRequest
from backend.requests.tokenize import TokenizeRequestReader
from prefix_store.identity.keys import Published


def publish(files: Iterable[Path], tokens: TokenizeRequestReader, published: Published) -> None:
    """Publishes what is in files: a JSON object with ``messages`` and ``tools`` as in a chat, or else a text.

    Of a conversation its messages count, without the opening of the answer. Engines that share blocks must publish the
    same.

    Raises:
        ModelError: names the file, and what is wrong with it.
    """
    for file in files:
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"--public-prefix {file}: {error}") from error
        try:
            ids = tokens.ids(_request(text))
        except (msgspec.DecodeError, RequestError) as error:
            raise ModelError(f"--public-prefix {file}: {error}") from error
        if not published.publish(ids):
            raise ModelError(
                f"--public-prefix {file}: {len(ids)} tokens fill no block; expected at least {published.block_size}"
            )


def _request(text: str) -> TokenizeRequest:
    if not text.lstrip().startswith("{"):
        return TokenizeRequest(prompt=text)
    asked = msgspec.json.decode(text, type=TokenizeRequest)
    asked.add_generation_prompt = None if asked.messages is None else False
    return asked
