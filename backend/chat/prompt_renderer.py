"""From the messages of a request to the token ids of its prompt."""

from __future__ import annotations

from typing import Any

from backend.chat.messages import template_message
from backend.chat.prompt_encoder import PromptEncoder
from backend.chat.tokenizer import ModelTokenizer
from backend.errors import InvalidRequest
from backend.protocol import Message
from backend.text.context import Context
from backend.text.token_ids import check_known


class PromptRenderer:
    """Checks conversations for one model and renders them with its chat template."""

    def __init__(self, model_name: str, tokenizer: ModelTokenizer, vocab_size: int, context: Context) -> None:
        template = tokenizer.chat_template
        self._model_name = model_name
        self._tokenizer, self._vocab_size = tokenizer.fast, vocab_size
        self._context = context
        self._template = "" if template is None else template.source
        self._encoder = None if template is None else PromptEncoder(tokenizer.fast, template)

    def contains_control_text(self, messages: list[Message]) -> bool:
        """Whether a message has the text of a control token, which makes encoding much slower."""
        values = [{"": message.content or ""} for message in messages]
        return self._encoder is not None and self._encoder.contains_control_text(values, None)

    def render(self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the prompt.

        Args:
            tools: tools that the prompt describes, in OpenAI's form; None: no tools.
            add_generation_prompt: whether the prompt ends with the opening of the assistant's turn.

        Raises:
            InvalidRequest, ContextLengthExceeded: names the message and its field.
        """
        if self._encoder is None:
            raise InvalidRequest(
                f"the model '{self._model_name}' has no chat template; use /v1/completions", "messages"
            )
        if not messages:
            raise InvalidRequest("messages: expected at least one message", "messages")
        plain = [template_message(message, f"messages[{i}]", self._template) for i, message in enumerate(messages)]
        length = sum(len(message["content"].encode("utf-8", "surrogatepass")) for message in plain)
        self._context.check_text(length, "messages")
        ids = self._encoder.encode(plain, tools, add_generation_prompt)
        self._context.check_prompt(ids, "messages")
        check_known(self._tokenizer, ids, self._vocab_size, "messages")
        return ids
