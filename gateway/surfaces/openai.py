"""OpenAI's chat completions and completions: the forms that every upstream has."""

from cache.entries.answer import stream_of
from cache.entries.entry import Family
from gateway.surfaces.surface import ChatRequest, Json, StreamedForm


class OpenAIForm(StreamedForm):
    """Chat completions, or completions."""

    def __init__(self, family: Family, path: str) -> None:
        self.family = family
        self.paths = (path,)

    def own_stream(self, answer: Json, request: ChatRequest) -> bytes:
        """Chunks, with the usage on a last one if the client asked for it, and [DONE]."""
        return stream_of(answer, request.include_usage)


CHAT = OpenAIForm("chat.completions", "/v1/chat/completions")
COMPLETIONS = OpenAIForm("completions", "/v1/completions")
