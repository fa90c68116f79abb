"""What the two endpoints of Ollama that answer a prompt have in common: their answers, streams and errors."""

import time
from collections.abc import Callable

import msgspec

from gateway.errors import GatewayError
from gateway.surfaces.ollama.answers import Shape, chat_answer, own_answer
from gateway.surfaces.ollama.lines import STREAM_TYPE, LineAssembler, LineTranslator, line_of, stream_of
from gateway.surfaces.surface import Assembler, ChatRequest, Json, Surface, Translator

_encode = msgspec.json.Encoder().encode


class OllamaSurface(Surface):
    """An endpoint whose answers have this shape. `clock` counts nanoseconds, for the durations of streams."""

    shape: Shape
    stream_type = STREAM_TYPE

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock

    def own_answer(self, answer: Json, request: ChatRequest, entry_id: str) -> Json:
        return own_answer(answer, self.shape)

    def chat_answer(self, answer: Json) -> Json:
        return chat_answer(answer, self.shape)

    def own_stream(self, answer: Json, request: ChatRequest) -> bytes:
        return stream_of(answer, self.shape)

    def translator(self, request: ChatRequest, entry_id: str) -> Translator:
        return LineTranslator(self.shape, self._clock)

    def assembler(self) -> Assembler:
        return LineAssembler(self.shape)

    def error_body(self, error: GatewayError) -> bytes:
        return _encode({"error": error.message})

    def error_event(self, error: GatewayError) -> bytes:
        return line_of({"error": error.message})
