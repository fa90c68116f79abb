"""The endpoints that compute: OpenAI's, and the two for tokens as vLLM has them."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt
from aiohttp import web

from backend.api.generate import generate
from backend.api.http_body import LARGE_BODY_BYTES, PREFIX_HEADER, json_response, off_loop, read_body
from backend.api.server_state import STATE, ServerState
from backend.api.streaming import stream
from backend.engine.sequence import Sequence
from backend.protocol import (
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
from backend.responses.embeddings import embeddings_answer


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions``."""
    state = request.app[STATE]
    body = await read_body(request)
    asked = await off_loop(body, lambda: decode_request(body, ChatRequest, state.model.name))
    work = await _read_chat(state, asked, len(body))
    return await _answer(request, work, ChatResponseBuilder, converses=True)


async def completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``."""
    state = request.app[STATE]
    body = await read_body(request)
    asked = await off_loop(body, lambda: decode_request(body, CompletionRequest, state.model.name))
    work = await off_loop(body, lambda: state.reader.completions.read(asked))
    return await _answer(request, work, CompletionResponseBuilder, converses=False)


async def embeddings(request: web.Request) -> web.Response:
    """``POST /v1/embeddings``: the mean of a text's last hidden states, as a unit vector."""
    state = request.app[STATE]
    body = await read_body(request)
    asked = await off_loop(body, lambda: decode_request(body, EmbeddingRequest, state.model.name))
    sequences = await off_loop(body, lambda: state.reader.embeddings.read(asked))
    # As many at a time as the engine takes from one request: the others wait here, not in its queue.
    means: list[npt.NDArray[np.float32]] = []
    for first in range(0, len(sequences), state.reader.most_sequences):
        means += await _means(request, sequences[first : first + state.reader.most_sequences])
    prompt_tokens = sum(sequence.num_prompt for sequence in sequences)
    answer = embeddings_answer(means, state.model.name, prompt_tokens, asked.encoding_format == "base64")
    return json_response(answer)


async def tokenize(request: web.Request) -> web.Response:
    """``POST /tokenize``."""
    state = request.app[STATE]
    body = await read_body(request)
    asked = await off_loop(body, lambda: decode_request(body, TokenizeRequest, state.model.name))
    return json_response(await asyncio.to_thread(_tokens, state, asked))


async def detokenize(request: web.Request) -> web.Response:
    """``POST /detokenize``."""
    state = request.app[STATE]
    body = await read_body(request)
    asked = await off_loop(body, lambda: decode_request(body, DetokenizeRequest, state.model.name))
    return json_response({"prompt": await asyncio.to_thread(state.reader.tokens.text, asked)})


async def _read_chat(state: ServerState, asked: ChatRequest, length: int) -> GenerationRequest:
    chats = state.reader.chats
    if chats.has_form(asked):
        return await asyncio.get_running_loop().run_in_executor(state.form_threads, chats.read, asked)
    if length >= LARGE_BODY_BYTES or chats.takes_time(asked):
        return await asyncio.to_thread(chats.read, asked)
    return chats.read(asked)


async def _answer(
    request: web.Request, work: GenerationRequest, make_format: type[ResponseBuilder], *, converses: bool
) -> web.StreamResponse:
    state = request.app[STATE]
    answer = make_format(work, state.model.name, state.fingerprint, state.model.tokenizer.token_bytes)
    async with generate(request, work.sequences, work.form, converses=converses) as arrivals:
        if work.stream:
            return await stream(request, answer, arrivals, work.include_usage)
        response = json_response(answer.whole(await arrivals.all()))
    response.headers[PREFIX_HEADER] = str(answer.cached_tokens)
    return response


async def _means(request: web.Request, sequences: list[Sequence]) -> list[npt.NDArray[np.float32]]:
    async with generate(request, sequences) as arrivals:
        outputs = await arrivals.all()
    return [output.embedding for parts in outputs for output in parts if output.embedding is not None]


def _tokens(state: ServerState, asked: TokenizeRequest) -> dict[str, object]:
    ids = state.reader.tokens.ids(asked)
    return {
        "count": len(ids),
        "max_model_len": state.model.max_context,
        "tokens": ids,
        "token_strs": state.reader.tokens.texts(ids) if asked.return_token_strs else None,
    }
