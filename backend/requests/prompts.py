"""Prompts of completions and embeddings: a text, a list of texts, token ids, or lists of token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.errors import InvalidRequest
from backend.text.context import Context
from backend.text.token_ids import check_known, token_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompt = str | list[str | int | list[int]]


class PromptReader:
    """Reads prompts for one model.

    Args:
        vocab_size: token ids are below it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, context: Context) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._context = context

    def read(self, prompt: Prompt, field: str) -> list[list[int]]:
        """Token ids of each prompt, at least one.

        Raises:
            InvalidRequest, ContextLengthExceeded: names ``field`` or the item of it.
        """
        if isinstance(prompt, str):
            return [self._encode(prompt, field)]
        if not prompt:
            raise InvalidRequest(f"{field}: the list is empty", field)
        if all(isinstance(item, int) for item in prompt):
            return [self.ids([item for item in prompt if isinstance(item, int)], field)]
        encoded = []
        for index, item in enumerate(prompt):
            where = f"{field}[{index}]"
            if isinstance(item, int) or not isinstance(item, type(prompt[0])):
                raise InvalidRequest(f"{where}: texts, token ids and lists of token ids cannot be mixed", where)
            encoded.append(self._encode(item, where) if isinstance(item, str) else self.ids(item, where))
        return encoded

    def ids(self, ids: list[int], where: str) -> list[int]:
        """One prompt's token ids, as they are given.

        Raises:
            InvalidRequest, ContextLengthExceeded: names ``where``.
        """
        self._context.check_prompt(ids, where)
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise InvalidRequest(f"{where}: token ids go from 0 to {self._vocab_size - 1}", where)
        return ids

    def _encode(self, text: str, where: str) -> list[int]:
        self._context.check_text(len(text.encode("utf-8", "surrogatepass")), where)
        ids = token_ids(self._tokenizer, text)
        self._context.check_prompt(ids, where)
        check_known(self._tokenizer, ids, self._vocab_size, where)
        return ids


def prompt_count(prompt: Prompt) -> int:
    """The number of prompts, without reading them."""
    return 1 if isinstance(prompt, str) or isinstance(next(iter(prompt), None), int) else len(prompt)
