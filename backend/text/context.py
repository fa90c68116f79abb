"""The limit on the tokens of a prompt and its answer together."""

from __future__ import annotations

from backend.errors import ContextLengthExceeded, InvalidRequest


class Context:
    """The context of one model.

    Args:
        max_tokens: longest prompt plus answer.
        longest_token: bytes of the token with the longest text.
    """

    def __init__(self, max_tokens: int, longest_token: int) -> None:
        self.max_tokens = max_tokens
        self._longest_token = longest_token

    def check_text(self, length: int, where: str) -> None:
        """Refuses a text of so many bytes that no tokenizer could make it fit, before time is spent on it.

        Raises:
            ContextLengthExceeded: names ``where``.
        """
        self._check(length // self._longest_token, where)

    def check_prompt(self, ids: list[int], where: str) -> None:
        """Refuses a prompt without tokens, and one that leaves no room for an answer.

        Raises:
            InvalidRequest, ContextLengthExceeded: names ``where``.
        """
        if not ids:
            raise InvalidRequest(f"{where}: the prompt is empty", where)
        self._check(len(ids), where)

    def answer_tokens(self, prompt_tokens: int, asked: int | None, field: str, least: int) -> int:
        """Maximum tokens of the answer: ``asked``, or all that fit the context if that is None or more.

        Apps ask for as much as large models can write, whatever model they use.

        Raises:
            InvalidRequest: names ``field``.
        """
        room = self.max_tokens - prompt_tokens
        if asked is not None and asked < least:
            raise InvalidRequest(f"{field}: out of range, expected at least {least}", field)
        return room if asked is None else min(asked, room)

    def _check(self, tokens: int, where: str) -> None:
        if tokens >= self.max_tokens:
            raise ContextLengthExceeded(
                f"{where}: the prompt has {tokens} tokens or more, the context is {self.max_tokens} "
                "tokens for prompt and answer together; shorten the prompt",
                where,
            )
