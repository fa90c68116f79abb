"""The surface of Anthropic's Messages."""

from cache.entries.entry import Family
from gateway.errors import GatewayError
from gateway.surfaces.messages import errors
from gateway.surfaces.messages.answers import chat_answer, own_answer
from gateway.surfaces.messages.assembler import MessageAssembler
from gateway.surfaces.messages.requests import chat_request
from gateway.surfaces.messages.streams import stream_of
from gateway.surfaces.messages.translator import MessagesTranslator
from gateway.surfaces.surface import Assembler, ChatRequest, Json, Surface, Translator


class MessagesSurface(Surface):
    """`POST /v1/messages`."""

    family: Family = "messages"
    paths = ("/v1/messages",)

    def chat_request(self, path: str, fields: Json) -> ChatRequest:
        return chat_request(fields)

    def own_answer(self, answer: Json, request: ChatRequest, entry_id: str) -> Json:
        return own_answer(answer, entry_id)

    def chat_answer(self, answer: Json) -> Json:
        return chat_answer(answer)

    def own_stream(self, answer: Json, request: ChatRequest) -> bytes:
        return stream_of(answer)

    def translator(self, request: ChatRequest, entry_id: str) -> Translator:
        return MessagesTranslator(entry_id)

    def assembler(self) -> Assembler:
        return MessageAssembler()

    def error_body(self, error: GatewayError) -> bytes:
        return errors.error_body(error)

    def error_event(self, error: GatewayError) -> bytes:
        return errors.error_event(error)
