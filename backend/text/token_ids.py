"""From text to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from backend.errors import InvalidRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LONGEST_QUOTED = 40


def token_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text, computed without Python's lock.

    The tokenizer's method for a single text holds the lock for as long as it takes (half a second for a text of
    300 kB), in which no other thread, and so no event loop, does anything. The one for batches lets go of it.
    """
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def unknown_token(tokenizer: Tokenizer, ids: Sequence[int], rows: int) -> str | None:
    """Describes a token beyond the model's embedding; None: there is none.

    A tokenizer may have tokens past the embedding's end, which are no reason to refuse a model: many have one that
    nobody writes. A step that looked one up would read what is not the embedding's.

    Args:
        rows: of the embedding.
    """
    if not ids or (largest := max(ids)) < rows:
        return None
    name = tokenizer.id_to_token(largest)
    called = "a token" if name is None else f"the token {_shortened(name)!r}"
    return f"the tokenizer makes {called} of id {largest}, but the model's embedding has {rows} rows"


def check_known(tokenizer: Tokenizer, ids: Sequence[int], rows: int, where: str) -> None:
    """Refuses a prompt with a token that the model does not know.

    Raises:
        InvalidRequest: names ``where``, the token and the embedding's rows.
    """
    if (unknown := unknown_token(tokenizer, ids, rows)) is not None:
        raise InvalidRequest(f"{where}: {unknown}; expected a prompt without it", where)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTED else text[:_LONGEST_QUOTED] + "…"
