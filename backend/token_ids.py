"""From text to token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def token_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text, computed without Python's lock.

    The tokenizer's method for a single text holds the lock for as long as it takes (half a second for a text of
    300 kB), in which no other thread, and so no event loop, does anything. The one for batches lets go of it.
    """
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids
