"""From a conversation to token ids, so that only the chat template can write control tokens.

``<|im_end|>`` in a message means those ten characters; it must not end the turn. Before the template runs, the texts of
control tokens in the caller's strings are replaced by private characters. So in the rendered prompt such a text comes
from the template, and is replaced by an alias with a random nonce. A second tokenizer, which knows control tokens by
these aliases only, encodes the result.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from backend.chat.chat_template import ChatTemplate
from backend.errors import InvalidRequest
from backend.text.token_ids import token_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Unicode's supplementary private use planes, without the two noncharacters at the end of each.
_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

# The end of a message that the answer continues; no control token has an empty text.
_END = ""

Values = Sequence[Mapping[str, Any]]
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt, ready for the model."""

    ids: list[int]
    opens_reasoning: bool
    """Whether the answer begins within the model's thoughts."""


class PromptEncoder:
    """Encodes conversations for one tokenizer and one template. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        # An added token in the template is a control token even if the tokenizer does not mark it as special.
        self._ids = {
            token.content: token_id
            for token_id, token in added.items()
            if token.content.strip() and (token.special or token.content in template.source)
        }
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._nonce = secrets.token_hex(8)
        self._alias_tokenizer: Tokenizer | None = None
        self._lock = threading.Lock()

    def contains_control_text(self, given: Any) -> bool:
        """Whether a string of the caller has the text of a control token. Encoding is slower then, the first time by
        far.
        """
        return any(self._control.search(text) for text in _strings(given))

    def encode(
        self,
        messages: Values,
        tools: Values | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = NO_VARIABLES,
        continues: bool = False,
    ) -> EncodedPrompt:
        """The token ids of the prompt.

        Args:
            variables: further ones for the template.
            continues: whether the prompt ends within the last message, which the answer continues.

        Raises:
            InvalidRequest: the template refuses the conversation, its values are nested too deeply, or the tokenizer
                cannot tell text from control.
        """
        try:
            return self._encode(messages, tools, add_generation_prompt, variables, continues)
        except RecursionError as error:
            raise InvalidRequest("messages: they, or the tools, are nested too deeply", "messages") from error

    def _encode(
        self,
        messages: Values,
        tools: Values | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        continues: bool,
    ) -> EncodedPrompt:
        given = [messages, tools or [], variables]
        is_plain = not (continues or self.contains_control_text(given))
        placeholders = {} if is_plain else self._placeholders(given)
        end = placeholders.pop(_END, "")
        if placeholders:
            messages, tools, variables = (_replaced(values, self._control, placeholders) for values in given)
        if continues:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + end}]
        prompt = self._template.render(messages, tools, add_generation_prompt and not continues, variables)
        if continues:
            prompt, found, _ = prompt.partition(end)
            if not found:
                raise InvalidRequest(
                    "continue_final_message: the model's chat template leaves out the last message",
                    "continue_final_message",
                )
        reasoning = self._template.reasoning_format
        opens = reasoning is not None and reasoning.opened_by(prompt)
        if not placeholders:
            return EncodedPrompt(token_ids(self._tokenizer, prompt, add_special_tokens=False), opens)
        spelled = self._control.sub(lambda match: self._alias(match[0]), prompt)
        back = {ord(private): text for text, private in placeholders.items()}
        return EncodedPrompt(token_ids(self._with_aliases(), spelled.translate(back), add_special_tokens=False), opens)

    def _placeholders(self, given: Sequence[Any]) -> dict[str, str]:
        """A private character, used in no string, for each text of a control token that is, and one for `_END`."""
        used, texts = set[str](), {_END}
        for text in _strings(given):
            used.update(text)
            texts.update(self._control.findall(text))
        free = (chr(code) for plane in _PRIVATE for code in plane if chr(code) not in used)
        if len(placeholders := dict(zip(sorted(texts), free, strict=False))) < len(texts):
            raise InvalidRequest("messages: they use every private character of Unicode; leave one out", "messages")
        return placeholders

    def _alias(self, text: str) -> str:
        return f"<{self._nonce}:{self._ids[text]}>"

    def _with_aliases(self) -> Tokenizer:
        with self._lock:
            if self._alias_tokenizer is None:
                self._alias_tokenizer = self._make_alias_tokenizer()
            return self._alias_tokenizer

    def _make_alias_tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        values: dict[str, Any] = json.loads(self._tokenizer.to_str())
        vocab = values["model"]["vocab"]
        for text in self._ids.keys() & vocab.keys():
            vocab[self._alias(text)] = vocab.pop(text)
        for token in values["added_tokens"]:
            if token["content"] in self._ids:
                token["content"] = self._alias(token["content"])
        renamed = Tokenizer.from_str(json.dumps(values))
        if any(renamed.token_to_id(self._alias(text)) != token_id for text, token_id in self._ids.items()):
            raise InvalidRequest(
                "messages: they contain the text of a control token, which this tokenizer cannot encode as text",
                "messages",
            )
        return renamed


def _strings(value: Any) -> Iterator[str]:
    """Every string in messages and tools, including field names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _replaced(value: Any, pattern: re.Pattern[str], placeholders: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda match: placeholders[match[0]], value)
    if isinstance(value, Mapping):
        return {
            _replaced(key, pattern, placeholders): _replaced(item, pattern, placeholders) for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [_replaced(item, pattern, placeholders) for item in value]
    return value
