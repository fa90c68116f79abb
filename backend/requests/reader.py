"""The readers of all endpoints for one model, and what they share."""

from __future__ import annotations

from backend.chat.grammar import GrammarCompiler
from backend.chat.output_constraint import OutputConstraintReader
from backend.chat.prompt_renderer import PromptRenderer
from backend.model import ServedModel
from backend.requests.chat import ChatRequestReader
from backend.requests.completions import CompletionRequestReader
from backend.requests.embeddings import EmbeddingRequestReader
from backend.requests.generation_request import SequenceFactory
from backend.requests.prompts import PromptReader
from backend.requests.tokenize import TokenizeRequestReader
from backend.text.context import Context


class RequestReader:
    """One reader for each endpoint. A reader uses or refuses every field of a body.

    Args:
        max_sequences: limit of prompts times ``n`` of one request.
        accepts_priority: whether requests may set ``priority``.
        drop_images: whether parts of messages that are not text are left out; else they are an error.
    """

    def __init__(
        self, model: ServedModel, max_sequences: int, accepts_priority: bool, drop_images: bool = False
    ) -> None:
        tokenizer, vocab_size, end_tokens = model.tokenizer, model.config.vocab_size, model.config.eos_token_ids
        self._grammars = GrammarCompiler(tokenizer.fast, vocab_size, end_tokens)
        context = Context(model.max_context, tokenizer.token_bytes.longest())
        prompts = PromptReader(tokenizer.fast, vocab_size, context)
        renderer = PromptRenderer(model.name, tokenizer, vocab_size, context, drop_images)
        constraints = OutputConstraintReader(model.name, tokenizer, self._grammars, bool(end_tokens))
        self.max_sequences = max_sequences
        self.sequences = SequenceFactory(tokenizer.token_bytes, self._grammars, max_sequences, accepts_priority)
        template = tokenizer.chat_template
        reasoning_format = None if template is None else template.reasoning_format
        self.chats = ChatRequestReader(
            renderer, constraints, context, self.sequences, reasoning_format, vocab_size, model.sampling
        )
        self.completions = CompletionRequestReader(
            prompts, constraints, context, self.sequences, vocab_size, model.sampling
        )
        self.embeddings = EmbeddingRequestReader(prompts, self.sequences, model.config.hidden_size)
        self.tokens = TokenizeRequestReader(tokenizer, prompts, renderer)

    def close(self) -> None:
        """Stops the grammar thread; call it after the engine has stopped."""
        self._grammars.close()
