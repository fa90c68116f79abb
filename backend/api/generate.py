"""Submits the sequences of a request to the engine and receives their outputs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Many
from contextlib import asynccontextmanager

from aiohttp import web

from backend.api.http_body import RECEIVED_AT
from backend.api.request_headers import is_one_shot, set_deadline, tenant_keys
from backend.api.server_state import STATE
from backend.api.traces import record_answer, record_prompt, trace_of
from backend.chat.grammar import GrammarConstraint
from backend.chat.output_constraint import OutputConstraint
from backend.engine.async_engine import Generation
from backend.engine.output_processor import Output
from backend.engine.sequence import FinishReason, Sequence
from backend.errors import DeadlineExceeded, GenerationFailed, InvalidRequest, Unavailable

_FIRST_TOKEN_OBSERVED: web.RequestKey[bool] = web.RequestKey("_FIRST_TOKEN_OBSERVED")


class OutputStream:
    """The engine's outputs for the sequences of one request, in the order of their arrival."""

    def __init__(
        self,
        request: web.Request,
        sequences: Many[Sequence],
        generation: Generation,
        output_constraint: OutputConstraint | None,
    ) -> None:
        self._request = request
        self._state = request.app[STATE]
        self._sequences = sequences
        self._output_constraint = output_constraint
        self._generation = generation
        self.first_token_at: float | None = None
        """``time.monotonic()`` seconds; None: there is no token yet."""

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return not self._generation.unfinished

    async def next_outputs(self) -> list[tuple[int, Output]]:
        """Waits for outputs and returns all that have arrived: (index of the sequence, output).

        Raises:
            DeadlineExceeded, Unavailable, GenerationFailed: a sequence ended without an answer.
            InvalidRequest: the output constraint could not be followed.
        """
        arrived = await self._generation.take()
        if any(output.num_generated or output.embedding is not None for _, output in arrived):
            self._observe_first_token()
        for index, output in arrived:
            self._raise_if_failed(self._sequences[index], output)
        return arrived

    async def all_outputs(self) -> list[list[Output]]:
        """All outputs of each sequence, once all have ended; raises what ``next_outputs`` does."""
        outputs: list[list[Output]] = [[] for _ in self._sequences]
        while not self.finished:
            for index, output in await self.next_outputs():
                outputs[index].append(output)
        return outputs

    def _observe_first_token(self) -> None:
        if self.first_token_at is not None:
            return
        self.first_token_at = time.monotonic()
        record_prompt(trace_of(self._request), self._sequences, self.first_token_at)
        if not self._request.get(_FIRST_TOKEN_OBSERVED):
            self._request[_FIRST_TOKEN_OBSERVED] = True
            self._state.metrics.first_token_seconds.observe(self.first_token_at - self._request[RECEIVED_AT])

    def _raise_if_failed(self, sequence: Sequence, output: Output) -> None:
        if output.finish_reason is not None and self._output_constraint is not None:
            self._raise_if_constraint_failed(self._output_constraint, sequence)
        match output.finish_reason:
            case FinishReason.EXPIRED:
                raise DeadlineExceeded(output.error or "the request's deadline passed")
            case FinishReason.SHED:
                raise Unavailable(output.error or self._state.engine.unavailable_because)
            case FinishReason.FAILED:
                if not self._state.engine.alive:
                    raise Unavailable(self._state.engine.unavailable_because)
                raise GenerationFailed(output.error or "the engine failed while it worked on this request; try again")

    def _raise_if_constraint_failed(self, output_constraint: OutputConstraint, sequence: Sequence) -> None:
        """A constraint that no token can follow is the caller's fault: a retry would end the same way."""
        constraint = sequence.constraint
        if isinstance(constraint, GrammarConstraint) and constraint.error:
            names = " and ".join(output_constraint.fields)
            raise InvalidRequest(f"{names}: too complex to follow: {constraint.error}", output_constraint.fields[0])


@asynccontextmanager
async def generate(
    request: web.Request,
    sequences: Many[Sequence],
    output_constraint: OutputConstraint | None = None,
    *,
    one_shot: bool = True,
    cache_salt: str = "",
) -> AsyncIterator[OutputStream]:
    """Submits sequences to the engine on behalf of the caller.

    However the block ends, also when the client disconnects, the sequences end before the engine's next step.

    Args:
        output_constraint: of the sequences, for error messages; None: any text.
        one_shot: whether no follow-up is expected, where the request's headers do not say.
        cache_salt: separates KV blocks within a tenant.

    Raises:
        InvalidRequest: a header is wrong.
        QueueFull, Unavailable: the engine does not accept them.
    """
    set_deadline(request, sequences)
    state = request.app[STATE]
    keys = tenant_keys(request, cache_salt)
    for sequence in sequences:
        sequence.keys = keys
    span = trace_of(request)
    await state.prefixes.ask(sequences, is_one_shot(request, default=one_shot), span)
    generation = state.engine.submit(sequences)
    outputs = OutputStream(request, sequences, generation, output_constraint)
    try:
        yield outputs
    finally:
        state.engine.release(sequences, generation)
        state.prefixes.ended(sequences)
        record_answer(span, sequences, outputs.first_token_at, time.monotonic())
