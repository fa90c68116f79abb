"""``POST /v1/embeddings``: from its body to sequences that generate nothing."""

from __future__ import annotations

from backend.engine.sequence import Sequence
from backend.errors import InvalidRequest
from backend.protocol import EmbeddingRequest
from backend.requests.generation_request import SequenceFactory
from backend.requests.prompts import PromptReader, prompt_count

_MAX_INPUTS = 2048


class EmbeddingRequestReader:
    """Reads embedding requests for one model.

    Args:
        dimensions: length of an embedding.
    """

    def __init__(self, prompts: PromptReader, sequences: SequenceFactory, dimensions: int) -> None:
        self._prompts = prompts
        self._sequences = sequences
        self._dimensions = dimensions

    def read(self, request: EmbeddingRequest) -> list[Sequence]:
        """One sequence for each input.

        Raises:
            InvalidRequest, ContextLengthExceeded: names the field.
        """
        if request.dimensions not in (None, self._dimensions):
            # Only models trained for it have embeddings that can be truncated.
            raise InvalidRequest(
                f"dimensions: expected {self._dimensions}, as this model's embeddings have", "dimensions"
            )
        if (count := prompt_count(request.input)) > _MAX_INPUTS:
            raise InvalidRequest(f"input: {count} inputs, expected at most {_MAX_INPUTS}", "input")
        return self._sequences.pooling(self._prompts.read(request.input, "input"), request.priority)
