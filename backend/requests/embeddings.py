"""From the body of ``POST /v1/embeddings`` to sequences for the engine."""

from __future__ import annotations

from backend.engine.sequence import Sequence
from backend.errors import InvalidRequest
from backend.protocol import EmbeddingRequest
from backend.requests.generation_request import SequenceFactory
from backend.requests.prompts import PromptReader, prompt_count

_MOST_INPUTS = 2048


class EmbeddingRequestReader:
    """Reads embedding requests for one model.

    Args:
        size: numbers of each embedding.
    """

    def __init__(self, prompts: PromptReader, maker: SequenceFactory, size: int) -> None:
        self._prompts = prompts
        self._maker = maker
        self._size = size

    def read(self, request: EmbeddingRequest) -> list[Sequence]:
        """One sequence for each input, each of which generates nothing.

        Raises:
            InvalidRequest, ContextLengthExceeded: names the field.
        """
        if request.dimensions not in (None, self._size):
            # A prefix of a vector means something only to models that were trained for it.
            expected = f"this model's embeddings have {self._size}, expected no other"
            raise InvalidRequest(f"dimensions: {expected}", "dimensions")
        if (count := prompt_count(request.input)) > _MOST_INPUTS:
            raise InvalidRequest(f"input: {count} inputs, expected at most {_MOST_INPUTS}", "input")
        return self._maker.pooled(self._prompts.read(request.input, "input"), request.priority)
