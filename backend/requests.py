"""From decoded bodies to work: every value checked, every field either honoured or refused by name."""

from __future__ import annotations

from backend.answer_form import FormReader
from backend.chat_requests import ChatReader
from backend.completion_requests import CompletionReader
from backend.context import Context
from backend.conversation import ConversationReader
from backend.embedding_requests import EmbeddingReader
from backend.grammar import Grammars
from backend.model import ServedModel
from backend.prompts import PromptReader
from backend.token_requests import TokenReader
from backend.work import WorkMaker


class RequestReader:
    """Reads requests for one model: a reader for each endpoint, made of what they share.

    Args:
        most_sequences: prompts times ``n`` of one request, at most.
        takes_priority: whether a request may say that it is more, or less, urgent than others.
    """

    def __init__(self, model: ServedModel, most_sequences: int, takes_priority: bool) -> None:
        text, vocab_size = model.text, model.config.vocab_size
        self._grammars = Grammars(text.tokenizer, vocab_size, model.config.eos_token_ids)
        context = Context(model.max_context, text.token_bytes.longest())
        prompts = PromptReader(text.tokenizer, vocab_size, context)
        conversations = ConversationReader(model, context)
        forms = FormReader(model, self._grammars)
        maker = self.maker = WorkMaker(text.token_bytes, self._grammars, most_sequences, takes_priority)
        self.most_sequences = most_sequences
        self.chats = ChatReader(conversations, forms, context, maker, vocab_size)
        self.completions = CompletionReader(prompts, context, maker, vocab_size)
        self.embeddings = EmbeddingReader(prompts, maker, model.config.hidden_size)
        self.tokens = TokenReader(text, prompts, conversations, forms)

    def close(self) -> None:
        """Lets go of what runs beside the engine; call it after the engine has stopped."""
        self._grammars.close()
