"""Sends a workload to an engine as the server would: the same reader, queue, thread and builders, but no HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Many
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from backend.api.app import create_app
from backend.api.server_state import STATE, ServerState
from backend.engine.config import EngineConfig
from backend.engine.output_processor import Output
from backend.engine.sequence import FinishReason, Sequence
from backend.errors import ModelError, RequestError
from backend.model import ServedModel
from backend.profiling.instrumentation import Recorder, clock
from backend.profiling.workload import WorkItem, read_item
from backend.requests.generation_request import GenerationRequest
from backend.responses.builder import ResponseBuilder
from backend.responses.chat import ChatResponseBuilder
from backend.responses.completions import CompletionResponseBuilder
from backend.text.stop_strings import StopStrings

_SECONDS = 600.0
"""Deadline of one request, and of whatever else is waited for."""
_FAILURES = (FinishReason.EXPIRED, FinishReason.SHED, FinishReason.FAILED)


@dataclass(slots=True)
class RequestRecord:
    """One request, from its arrival to its last token; times are seconds of ``clock``."""

    name: str
    arrived: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokenised: float = 0.0
    """When it had been checked, rendered and encoded."""
    queued: float = 0.0
    """When it was given to the engine; before that the prefix store was asked, if there is one."""
    started: float = 0.0
    """When it joined the batch."""
    token_times: list[float] = field(default_factory=list)
    """When tokens arrived, of all choices."""
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Seconds between two tokens of a choice (ITL)."""
    generated: list[int] = field(default_factory=list)
    """Tokens of each choice."""

    @property
    def first_token(self) -> float:
        """When the first token arrived, or the end if none did."""
        return self.token_times[0] if self.token_times else self.ended

    @property
    def ttft(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.first_token - self.arrived


@asynccontextmanager
async def opened(model: ServedModel, config: EngineConfig) -> AsyncIterator[ServerState]:
    """A server of the model, without a socket: its engine, prefix store and readers.

    Raises:
        ModelError: the prefix store cannot be opened.
    """
    app = create_app(model, config)
    server = web.AppRunner(app, handle_signals=False)
    await server.setup()
    try:
        yield app[STATE]
    finally:
        await server.cleanup()


async def replay(
    state: ServerState,
    items: Many[WorkItem],
    concurrency: int,
    recorder: Recorder | None = None,
    lengths: Mapping[str, list[int]] | None = None,
) -> list[RequestRecord]:
    """Sends all requests, so many at a time, and waits for the answers.

    Args:
        recorder: gets the spans of the event loop; None: they are not timed.
        lengths: tokens that each choice of a request is to have, by the request's name, so that runs do equal work;
            None: as the requests say.

    Returns:
        A record of each, in the order of ``items``.

    Raises:
        ModelError: a request failed; names it.
    """
    recorder = Recorder() if recorder is None else recorder
    await between_steps(state)  # begins a span in which the engine waits
    waiting = list(enumerate(items))[::-1]
    records: dict[int, RequestRecord] = {}

    async def client() -> None:
        while waiting:
            index, item = waiting.pop()
            try:
                async with asyncio.timeout(_SECONDS):
                    records[index] = await _answer(state, item, recorder, (lengths or {}).get(item.name))
            except TimeoutError as error:
                raise ModelError(f"{item.name}: not answered within {_SECONDS:.0f} s") from error
            except RequestError as error:
                raise ModelError(f"{item.name}: {error}") from error

    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(min(concurrency, len(items))):
                clients.create_task(client())
    except* ModelError as failures:
        raise failures.exceptions[0] from None
    await between_steps(state)  # ends the last one
    return [records[index] for index in sorted(records)]


async def forget(state: ServerState) -> None:
    """Empties the engine's own prefix cache, once a prefix store has all that it was to keep; it stays there."""
    await between_steps(state)
    async with asyncio.timeout(_SECONDS):
        await state.prefixes.settled()
    state.engine.command(state.engine.engine.forget_prefixes)
    await between_steps(state)


async def between_steps(state: ServerState) -> None:
    """Returns when the engine's thread has done everything that it was told before."""
    done = threading.Event()
    state.engine.command(done.set)
    if not await asyncio.to_thread(done.wait, _SECONDS):
        raise ModelError(f"the engine did not come to rest within {_SECONDS:.0f} s")


async def _answer(state: ServerState, item: WorkItem, recorder: Recorder, lengths: list[int] | None) -> RequestRecord:
    record = RequestRecord(item.name, clock())
    with recorder.on_loop("tokenise"):
        request = read_item(item, state.reader, state.model.name, state.strict_fields)
    record.tokenised, record.prompt_tokens = clock(), request.prompt_tokens
    sequences = request.sequences
    keys = state.tenants.keys([f"cache_salt:{request.cache_salt}"] if request.cache_salt else [])
    for index, sequence in enumerate(sequences):
        sequence.keys = keys
        if lengths is not None:
            _fix_length(sequence, lengths[index])
    await state.prefixes.ask(sequences, one_shot=False)
    record.queued = clock()
    generation = state.engine.submit(sequences)
    try:
        builder = _builder(state, item, request)
        last = [0.0] * len(sequences)
        outputs: list[list[Output]] = [[] for _ in sequences]
        while generation.unfinished:
            arrived = await generation.take()
            now = clock()
            _note(record, arrived, last, now)
            failed = next((output for _, output in arrived if output.finish_reason in _FAILURES), None)
            if failed is not None:
                raise ModelError(f"{item.name}: {failed.error or 'the engine failed while it worked on this request'}")
            with recorder.on_loop("respond"):
                _respond(builder, request, arrived, outputs)
        if not request.stream:
            with recorder.on_loop("respond"):
                msgspec.json.encode(builder.response(outputs))
    finally:
        state.engine.release(sequences, generation)
        state.prefixes.ended(sequences)
    record.ended = clock()
    record.started = min(sequence.started_at or record.queued for sequence in sequences)
    record.generated = [sequence.num_generated for sequence in sequences]
    record.cached_tokens = builder.cached_tokens
    return record


def _note(record: RequestRecord, arrived: list[tuple[int, Output]], last: list[float], now: float) -> None:
    for index, output in arrived:
        if not output.num_generated:
            continue
        record.token_times.append(now)
        if last[index]:
            record.gaps.append(now - last[index])
        last[index] = now


def _builder(state: ServerState, item: WorkItem, request: GenerationRequest) -> ResponseBuilder:
    make: type[ResponseBuilder] = ChatResponseBuilder if item.is_chat else CompletionResponseBuilder
    return make(request, state.model.name, state.fingerprint, state.model.tokenizer.token_bytes)


def _respond(
    builder: ResponseBuilder,
    request: GenerationRequest,
    arrived: list[tuple[int, Output]],
    outputs: list[list[Output]],
) -> None:
    """Makes the chunks of a stream, or keeps the outputs for the whole answer."""
    by_choice: dict[int, list[Output]] = {}
    for index, output in arrived:
        by_choice.setdefault(index, []).append(output)
    for index, some in by_choice.items():
        if request.stream:
            for chunk in builder.chunks(index, some):
                msgspec.json.encode(chunk)
        else:
            outputs[index] += some


def _fix_length(sequence: Sequence, tokens: int) -> None:
    """Has a sequence generate so many tokens, whatever they are; one with a constraint ends as its grammar does."""
    if sequence.constraint is None and tokens:
        sequence.params = dataclasses.replace(
            sequence.params, max_tokens=tokens, ignore_eos=True, stop=(), stop_token_ids=frozenset(), min_tokens=0
        )
        sequence.stop_strings = StopStrings(())
