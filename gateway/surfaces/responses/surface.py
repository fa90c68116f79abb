"""The OpenAI Responses API."""

from cache.entries.entry import Family
from gateway.errors import GatewayError
from gateway.surfaces.responses import answers, streams
from gateway.surfaces.responses.events import framed
from gateway.surfaces.responses.requests import chat_request
from gateway.surfaces.surface import Assembler, ChatRequest, Json, Surface, Translator


class ResponsesSurface(Surface):
    """What clients of OpenAI's Responses API send and get."""

    family: Family = "responses"
    paths = ("/v1/responses",)

    def chat_request(self, path: str, fields: Json) -> ChatRequest:
        return chat_request(fields)

    def own_answer(self, answer: Json, request: ChatRequest, entry_id: str) -> Json:
        return answers.own_answer(answer, request, entry_id)

    def chat_answer(self, answer: Json) -> Json:
        return answers.chat_answer(answer)

    def own_stream(self, answer: Json, request: ChatRequest) -> bytes:
        return streams.own_stream(answer)

    def translator(self, request: ChatRequest, entry_id: str) -> Translator:
        return streams.ResponseTranslator(request, entry_id)

    def assembler(self) -> Assembler:
        return streams.ResponseAssembler()

    def error_body(self, error: GatewayError) -> bytes:
        return error.body()

    def error_event(self, error: GatewayError) -> bytes:
        """The fields of the documented event, and `error`, which OpenAI sends and by which its clients raise.

        The number is 0: the event belongs to no stream here.
        """
        named = {"message": error.message, "param": error.param, "code": error.code}
        event = {"type": "error", "sequence_number": 0, **named, "error": {"type": error.kind, **named}}
        return framed(event)
