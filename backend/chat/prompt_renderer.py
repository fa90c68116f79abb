"""From the messages of a request to the prompt that its conversation becomes."""

from __future__ import annotations

from typing import Any

from backend.chat.messages import plain_message
from backend.chat.prompt_encoder import PromptEncoder
from backend.chat.tokenizer import ModelTokenizer
from backend.errors import InvalidRequest
from backend.protocol import Message
from backend.text.context import Context
from backend.text.token_ids import check_known


class PromptRenderer:
    """Reads conversations for one model."""

    def __init__(self, model_name: str, tokenizer: ModelTokenizer, vocab_size: int, context: Context) -> None:
        template = tokenizer.chat_template
        self._model_name = model_name
        self._tokenizer, self._vocab_size = tokenizer.fast, vocab_size
        self._context = context
        self._template = "" if template is None else template.source
        self._encoder = None if template is None else PromptEncoder(tokenizer.fast, template)

    def spells_control(self, messages: list[Message]) -> bool:
        """Whether a text is spelled like a control token, which makes the prompt much more work."""
        values = [{"": message.content or ""} for message in messages]
        return self._encoder is not None and self._encoder.spells_control(values, None)

    def read(self, messages: list[Message], tools: list[Any] | None, opens: bool = True) -> list[int]:
        """Token ids of a conversation.

        Args:
            tools: those that the prompt speaks of; None: no tools.
            opens: whether the prompt goes on to where the assistant's answer begins.

        Raises:
            InvalidRequest, ContextLengthExceeded: names the message and its field.
        """
        if self._encoder is None:
            raise InvalidRequest(
                f"the model '{self._model_name}' has no chat template; use /v1/completions", "messages"
            )
        if not messages:
            raise InvalidRequest("messages: expected at least one message", "messages")
        plain = [plain_message(message, f"messages[{i}]", self._template) for i, message in enumerate(messages)]
        length = sum(len(message["content"].encode("utf-8", "surrogatepass")) for message in plain)
        self._context.check_text(length, "messages")
        ids = self._encoder.encode(plain, tools, opens)
        self._context.check_prompt(ids, "messages")
        check_known(self._tokenizer, ids, self._vocab_size, "messages")
        return ids
