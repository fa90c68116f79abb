"""``POST /tokenize`` and ``POST /detokenize``: from their bodies to token ids and text."""

from __future__ import annotations

from backend.chat.prompt_renderer import PromptRenderer
from backend.chat.tokenizer import ModelTokenizer
from backend.chat.tools import read_tools
from backend.errors import InvalidRequest
from backend.protocol import DetokenizeRequest, TokenizeRequest
from backend.requests.chat import continues_last_message
from backend.requests.prompts import PromptReader
from backend.text.detokenizer import Detokenizer
from backend.text.token_ids import token_ids


class TokenizeRequestReader:
    """Turns text into token ids and back, for one model."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        prompts: PromptReader,
        renderer: PromptRenderer,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._renderer = renderer

    def ids(self, request: TokenizeRequest) -> list[int]:
        """Token ids of a prompt, or of the prompt that a conversation becomes.

        Raises:
            InvalidRequest, ContextLengthExceeded: names the field.
        """
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("prompt: expected either prompt or messages", "prompt")
        return self._ids_of_text(request) if request.messages is None else self._ids_of_chat(request)

    def texts(self, ids: list[int]) -> list[str]:
        """Text of each token on its own; part of a character is U+FFFD."""
        token_bytes = self._tokenizer.token_bytes
        return [token_bytes.shown(token_id).decode("utf-8", "replace") for token_id in ids]

    def text(self, request: DetokenizeRequest) -> str:
        """Text of the tokens together, special ones included.

        Raises:
            InvalidRequest, ContextLengthExceeded: names the field.
        """
        if not request.tokens:
            return ""
        token_bytes = self._tokenizer.token_bytes
        visible = frozenset(token_bytes.special_ids.values())
        return Detokenizer(token_bytes, visible=visible).decode(self._prompts.ids(request.tokens, "tokens"))

    def _ids_of_text(self, request: TokenizeRequest) -> list[int]:
        for field in ("tools", "add_generation_prompt", "continue_final_message"):
            if getattr(request, field) is not None:
                raise InvalidRequest(f"{field}: only with messages", field)
        special = request.add_special_tokens is not False
        return token_ids(self._tokenizer.fast, request.prompt or "", add_special_tokens=special)

    def _ids_of_chat(self, request: TokenizeRequest) -> list[int]:
        if request.add_special_tokens:
            field = "add_special_tokens"
            raise InvalidRequest(f"{field}: the chat template adds special tokens, expected false", field)
        tool_choice = read_tools(request.tools, None)
        add_generation_prompt = request.add_generation_prompt is not False
        tools = tool_choice.listed if tool_choice else None
        continues = continues_last_message(request)
        return self._renderer.render(request.messages or [], tools, add_generation_prompt, continues=continues).ids
