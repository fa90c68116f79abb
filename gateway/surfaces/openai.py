"""OpenAI's chat completions and completions: the forms that every upstream has."""

from cache.entries.answer import stream_of
from cache.entries.entry import Family
from gateway.errors import GatewayError
from gateway.surfaces.surface import AnswerForm, ChatRequest, Json


class OpenAIForm(AnswerForm):
    """Chat completions, or completions."""

    def __init__(self, family: Family, path: str) -> None:
        self.family = family
        self.paths = (path,)

    def own_stream(self, answer: Json, request: ChatRequest) -> bytes:
        """Chunks, with the usage on a last one if the client asked for it, and [DONE]."""
        return stream_of(answer, request.include_usage)

    def error_body(self, error: GatewayError) -> bytes:
        return error.body()

    def error_event(self, error: GatewayError) -> bytes:
        """No [DONE] follows it."""
        return error.event()


CHAT = OpenAIForm("chat.completions", "/v1/chat/completions")
COMPLETIONS = OpenAIForm("completions", "/v1/completions")
