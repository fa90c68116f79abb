"""From decoded bodies to work: every value checked, every field either honoured or refused by name."""

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
    """Reads requests for one model: a reader for each endpoint, made of what they share.

    Args:
        most_sequences: prompts times ``n`` of one request, at most.
        takes_priority: whether a request may say that it is more, or less, urgent than others.
    """

    def __init__(self, model: ServedModel, most_sequences: int, takes_priority: bool) -> None:
        tokenizer, vocab_size, end_tokens = model.tokenizer, model.config.vocab_size, model.config.eos_token_ids
        self._grammars = GrammarCompiler(tokenizer.fast, vocab_size, end_tokens)
        context = Context(model.max_context, tokenizer.token_bytes.longest())
        prompts = PromptReader(tokenizer.fast, vocab_size, context)
        conversations = PromptRenderer(model.name, tokenizer, vocab_size, context)
        forms = OutputConstraintReader(model.name, tokenizer, self._grammars, bool(end_tokens))
        maker = self.maker = SequenceFactory(tokenizer.token_bytes, self._grammars, most_sequences, takes_priority)
        self.most_sequences = most_sequences
        self.chats = ChatRequestReader(conversations, forms, context, maker, vocab_size)
        self.completions = CompletionRequestReader(prompts, context, maker, vocab_size)
        self.embeddings = EmbeddingRequestReader(prompts, maker, model.config.hidden_size)
        self.tokens = TokenizeRequestReader(tokenizer, prompts, conversations, forms)

    def close(self) -> None:
        """Lets go of what runs beside the engine; call it after the engine has stopped."""
        self._grammars.close()
