"""From the messages of a request to the token ids of its prompt."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.chat.chat_template import ChatTemplate
from backend.chat.messages import system_as_user, template_messages
from backend.chat.prompt_encoder import NO_VARIABLES, EncodedPrompt, PromptEncoder
from backend.chat.tokenizer import ModelTokenizer
from backend.chat.tools import shortened
from backend.errors import ContextLengthExceeded, InvalidRequest
from backend.protocol import Message
from backend.text.context import Context
from backend.text.token_ids import check_known, token_ids

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
_SHORTEST = 2
# Tools are shortened rather than leave an answer less room than this, or than a quarter of the context.
_MIN_ANSWER_TOKENS = 256


@dataclass(frozen=True)
class RenderedPrompt:
    """The prompt of a chat."""

    ids: list[int]
    opens_reasoning: bool
    """Whether the answer begins within the model's thoughts."""
    shortened_tools: bool
    """Whether parts of the tools' descriptions were left out, because all of them do not fit the context."""


class PromptRenderer:
    """Checks conversations for one model and renders them with its chat template.

    Args:
        drop_images: whether parts of messages that are not text are left out; else they are an error.
    """

    def __init__(
        self, model_name: str, tokenizer: ModelTokenizer, vocab_size: int, context: Context, drop_images: bool = False
    ) -> None:
        self._model_name = model_name
        self._tokenizer, self._vocab_size = tokenizer.fast, vocab_size
        self._context = context
        self._template = tokenizer.chat_template
        self._drop_images = drop_images
        self._encoder = None if self._template is None else PromptEncoder(tokenizer.fast, self._template)

    def predicted_ids(self, text: str) -> list[int]:
        """Token ids of what an answer may be, up to one that the model does not have."""
        ids = token_ids(self._tokenizer, text, add_special_tokens=False)
        return list(itertools.takewhile(lambda token_id: token_id < self._vocab_size, ids))

    def contains_control_text(self, messages: list[Message]) -> bool:
        """Whether a message has the text of a control token, which makes encoding much slower."""
        return self._encoder is not None and self._encoder.contains_control_text([m.content or "" for m in messages])

    def render(
        self,
        messages: list[Message],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = NO_VARIABLES,
        continues: bool = False,
    ) -> RenderedPrompt:
        """The prompt, with tools in fewer words if they do not fit the context otherwise.

        Args:
            tools: tools that the prompt describes, in OpenAI's form; None: no tools.
            add_generation_prompt: whether the prompt ends with the opening of the assistant's turn.
            variables: further ones that the template may read.
            continues: whether the answer continues the last message.

        Raises:
            InvalidRequest, ContextLengthExceeded: names the message and its field.
        """
        template, encoder = self._template, self._encoder
        if encoder is None or template is None:
            raise InvalidRequest(
                f"the model '{self._model_name}' has no chat template; use /v1/completions", "messages"
            )
        if not messages:
            raise InvalidRequest("messages: expected at least one message", "messages")
        if reserved := _RESERVED & variables.keys():
            field = f"chat_template_kwargs.{min(reserved)}"
            raise InvalidRequest(f"{field}: the request has a field of its own for it", field)
        plain = template_messages(messages, template, self._drop_images)
        length = sum(len(message["content"].encode("utf-8", "surrogatepass")) for message in plain)
        self._context.check_text(length, "messages")

        def encoded(level: int) -> EncodedPrompt:
            try:
                given, listed = _with_tools(template, plain, None if tools is None else shortened(tools, level))
            except RecursionError as error:
                raise InvalidRequest("tools: nested too deeply", "tools") from error
            return encoder.encode(given, listed, add_generation_prompt, variables, continues)

        level, prompt = 0, encoded(0)
        in_full = len(prompt.ids)
        while tools and level < _SHORTEST and not self._leaves_room(prompt):
            level += 1
            prompt = encoded(level)
        if tools and len(prompt.ids) >= self._context.max_tokens:
            self._refuse_tools(tools, encoder, plain, in_full, len(prompt.ids))
        self._context.check_prompt(prompt.ids, "messages")
        check_known(self._tokenizer, prompt.ids, self._vocab_size, "messages")
        return RenderedPrompt(prompt.ids, prompt.opens_reasoning, level > 0)

    def _leaves_room(self, prompt: EncodedPrompt) -> bool:
        limit = self._context.max_tokens
        return len(prompt.ids) <= limit - min(_MIN_ANSWER_TOKENS, limit // 4)

    def _refuse_tools(
        self, tools: Sequence[Any], encoder: PromptEncoder, plain: list[dict[str, Any]], full: int, shortest: int
    ) -> None:
        """Raises ContextLengthExceeded for the tools, unless the messages alone are too long."""
        template = self._template
        without = 0 if template is None else len(encoder.encode(*_with_tools(template, plain, None)).ids)
        if without < self._context.max_tokens:
            raise ContextLengthExceeded(
                f"tools: the {len(tools)} tools take {full - without} tokens, and {shortest - without} with names and "
                f"types alone; with {without} tokens of messages they do not fit the context of "
                f"{self._context.max_tokens} tokens; send fewer tools",
                "tools",
            )


def _with_tools(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]] | None]:
    """Messages and tools as the template takes them."""
    if template.generic_tools is None:
        return messages, tools
    applied = template.generic_tools.applied(messages, tools)
    if not template.takes_system and applied[0]["role"] == "system":
        applied = system_as_user(applied)
    return applied, None
