"""The endpoints that run the model: OpenAI's, and vLLM's ``/tokenize`` and ``/detokenize``.

Each handler reads and decodes its body (`backend.protocol`), has it checked and turned into sequences
(`backend.requests`), runs them (`generate`) and answers (`backend.responses`).
"""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt
from aiohttp import web

from backend.api.generate import generate
from backend.api.http_body import (
    LARGE_BODY_BYTES,
    PREFIX_HEADER,
    ignored_header,
    in_thread_if_large,
    json_response,
    read_body,
)
from backend.api.server_state import STATE, ServerState
from backend.api.streaming import stream
from backend.api.traces import tell_timings, trace_of
from backend.engine.sequence import Sequence
from backend.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    decode_request,
)
from backend.requests.generation_request import GenerationRequest
from backend.responses.builder import ResponseBuilder
from backend.responses.chat import ChatResponseBuilder
from backend.responses.completions import CompletionResponseBuilder
from backend.responses.embeddings import embedding_list


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions``."""
    state = request.app[STATE]
    body = await read_body(request)
    with trace_of(request).span("engine.tokenize"):
        chat, ignored = await _decode(body, ChatRequest, state)
        generation_request = await _read_chat(state, chat, len(body))
    return await _respond(request, generation_request, ignored, ChatResponseBuilder, one_shot=False)


async def completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``."""
    state = request.app[STATE]
    body = await read_body(request)
    with trace_of(request).span("engine.tokenize"):
        completion, ignored = await _decode(body, CompletionRequest, state)
        generation_request = await _read_completion(state, completion, body)
    return await _respond(request, generation_request, ignored, CompletionResponseBuilder, one_shot=True)


async def embeddings(request: web.Request) -> web.Response:
    """``POST /v1/embeddings``: the mean of a text's last hidden states, as a unit vector."""
    state = request.app[STATE]
    body = await read_body(request)
    embedding, ignored = await _decode(body, EmbeddingRequest, state)
    sequences = await in_thread_if_large(body, lambda: state.reader.embeddings.read(embedding))
    # The engine accepts so many sequences of one request; the rest waits here.
    batch = state.reader.max_sequences
    means: list[npt.NDArray[np.float32]] = []
    for first in range(0, len(sequences), batch):
        means += await _mean_hidden_states(request, sequences[first : first + batch])
    prompt_tokens = sum(sequence.num_prompt for sequence in sequences)
    response = json_response(
        embedding_list(means, state.model.name, prompt_tokens, embedding.encoding_format == "base64")
    )
    response.headers.update(ignored_header(ignored))
    return response


async def tokenize(request: web.Request) -> web.Response:
    """``POST /tokenize``."""
    state = request.app[STATE]
    body, _ = await _decode(await read_body(request), TokenizeRequest, state)
    return json_response(await asyncio.to_thread(_tokens, state, body))


async def detokenize(request: web.Request) -> web.Response:
    """``POST /detokenize``."""
    state = request.app[STATE]
    body, _ = await _decode(await read_body(request), DetokenizeRequest, state)
    return json_response({"prompt": await asyncio.to_thread(state.reader.tokens.text, body)})


async def _decode(body: bytes, kind: type[Body], state: ServerState) -> tuple[Body, tuple[str, ...]]:
    return await in_thread_if_large(
        body, lambda: decode_request(body, kind, state.model.name, strict=state.strict_fields)
    )


async def _read_chat(state: ServerState, chat: ChatRequest, body_bytes: int) -> GenerationRequest:
    chats = state.reader.chats
    if chats.may_compile_grammar(chat):
        return await asyncio.get_running_loop().run_in_executor(state.grammar_threads, chats.read, chat)
    if body_bytes >= LARGE_BODY_BYTES or chats.is_slow_to_encode(chat):
        return await asyncio.to_thread(chats.read, chat)
    return chats.read(chat)


async def _read_completion(state: ServerState, completion: CompletionRequest, body: bytes) -> GenerationRequest:
    read = state.reader.completions.read
    if completion.has_structured_output:
        return await asyncio.get_running_loop().run_in_executor(state.grammar_threads, read, completion)
    return await in_thread_if_large(body, lambda: read(completion))


async def _respond(
    request: web.Request,
    generation_request: GenerationRequest,
    ignored: tuple[str, ...],
    make_builder: type[ResponseBuilder],
    *,
    one_shot: bool,
) -> web.StreamResponse:
    state = request.app[STATE]
    builder = make_builder(generation_request, state.model.name, state.fingerprint, state.model.tokenizer.token_bytes)
    sequences, output_constraint = generation_request.sequences, generation_request.output_constraint
    headers = ignored_header((*ignored, *generation_request.ignored))
    async with generate(
        request, sequences, output_constraint, one_shot=one_shot, cache_salt=generation_request.cache_salt
    ) as outputs:
        if generation_request.stream:
            return await stream(request, builder, outputs, generation_request.include_usage, headers)
        response = json_response(builder.response(await outputs.all_outputs()))
    response.headers.update(headers)
    response.headers[PREFIX_HEADER] = str(builder.cached_tokens)
    tell_timings(request, response.headers)
    return response


async def _mean_hidden_states(request: web.Request, sequences: list[Sequence]) -> list[npt.NDArray[np.float32]]:
    async with generate(request, sequences) as outputs:
        results = await outputs.all_outputs()
    return [output.embedding for parts in results for output in parts if output.embedding is not None]


def _tokens(state: ServerState, body: TokenizeRequest) -> dict[str, object]:
    ids = state.reader.tokens.ids(body)
    return {
        "count": len(ids),
        "max_model_len": state.model.max_context,
        "tokens": ids,
        "token_strs": state.reader.tokens.texts(ids) if body.return_token_strs else None,
    }
